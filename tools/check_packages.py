"""Look at the packages in a folder as an index would, and refuse what should not be uploaded.

    python tools/check_packages.py dist [--tag v0.1.0] [--release]

There must be one source package and at least one wheel. `--tag` is the tag of the release, which
must name their version. `--release` looks at the repository, too: whether the changelog has a date
for this version, and no address but one stands for the repository's.
"""

from __future__ import annotations

import argparse
import email
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email.message import Message
from pathlib import Path, PurePosixPath

MOST_BYTES = 3 * 2**19
CHAPTERS = len(list(Path(__file__).parent.parent.glob("docs/course-*.md")))
MACHINES = ("x86_64", "aarch64")
WHEEL_NAME = re.compile(
    rf"unisono-[0-9a-z.]+-cp311-abi3-([\w.]*manylinux_\w+_({'|'.join(MACHINES)}))\.whl"
)

SOURCES = {"pyproject.toml", "CMakeLists.txt", "csrc", "src", "README.md", "CHANGELOG.md"}
SOURCES |= {"LICENSE", "PKG-INFO", "docs", "examples"}
NOT_SOURCE = (".so", ".o", ".pyc", ".png", ".svg", ".json")
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)|<(?:a|img)\b[^>]*?(?:href|src)=[\"']([^\"']+)", re.I)
PLACEHOLDER = "https://example.invalid"
"""Where the repository's address would stand: `.invalid` never leads anywhere (RFC 2606)."""
ADDRESSED = ("CITATION.cff", "SECURITY.md", "pyproject.toml", ".github/ISSUE_TEMPLATE/config.yml")
"""The files that `make address` changes."""
INVENTED = r"github(usercontent)?\.com/(unisono|owner|you)/|example\.(com|org)/unisono"
LEADS_SOMEWHERE = ("https://", "http://", "mailto:", "#")


def problems(folder: Path, tag: str = "") -> Iterator[str]:
    """Everything that is wrong, a sentence each."""
    sources, wheels = sorted(folder.glob("*.tar.gz")), sorted(folder.glob("*.whl"))
    if len(sources) != 1 or not wheels:
        yield f"{folder}: one source package and wheels belong here, not {names(folder)}"
    for package in (*sources, *wheels):
        size = package.stat().st_size
        if size >= MOST_BYTES:
            yield f"{package.name}: {size} bytes are too many, {MOST_BYTES} are allowed"
        is_wheel = package.suffix == ".whl"
        metadata, found = read_wheel(package) if is_wheel else read_source(package)
        for problem in (
            *found,
            *metadata_problems(metadata),
            *tag_problems(tag, metadata),
        ):
            yield f"{package.name}: {problem}"


def names(folder: Path) -> str:
    """What lies there."""
    return ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"


def read_wheel(package: Path) -> tuple[Message, list[str]]:
    """The metadata of a wheel, and what is wrong with its name and files."""
    found = []
    if not WHEEL_NAME.fullmatch(package.name):
        found.append("is not for cp311-abi3 on manylinux: was it repaired by auditwheel?")
    with zipfile.ZipFile(package) as archive:
        files = archive.namelist()
        (where,) = (name for name in files if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(where))
    libraries = [name for name in files if ".so" in PurePosixPath(name).suffixes]
    if libraries != ["unisono/_native.abi3.so"]:
        found.append(f"its libraries are {libraries}, and should be the engine alone")
    if "unisono/py.typed" not in files:
        found.append("lacks unisono/py.typed, so that nobody sees its types")
    if not any(name.startswith("unisono/show/assets/") for name in files):
        found.append("lacks unisono/show/assets, without which no page can be made")
    for part in ("chapters/course-", "solutions/chapter_"):
        if sum(name.startswith(f"unisono/learn/{part}") for name in files) < CHAPTERS:
            found += [f"lacks some of unisono/learn/{part}*, without which there is no course"]
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in files):
        found.append("lacks its licence")
    others = {name.split("/")[0] for name in files} - {"unisono"}
    if len(others) != 1:  # the folder of the metadata
        found.append(f"would install {sorted(others)} beside unisono")
    return metadata, found


def glibc(tags: str) -> str:
    """The oldest glibc that serves: `manylinux_2_27_x86_64.manylinux_2_28_x86_64` is 2.27."""
    versions = re.findall(r"manylinux_(\d+)_(\d+)", tags)
    return ".".join(map(str, min((int(major), int(minor)) for major, minor in versions)))


def read_source(package: Path) -> tuple[Message, list[str]]:
    """The metadata of a source package, and what is wrong with its files."""
    with tarfile.open(package) as archive:
        files = [PurePosixPath(name) for name in archive.getnames()]
        (where,) = (str(path) for path in files if path.parts[1:] == ("PKG-INFO",))
        file = archive.extractfile(where)
        assert file is not None
        metadata = email.message_from_bytes(file.read())
    top = {path.parts[1] for path in files if len(path.parts) > 1}
    found = []
    if top != SOURCES:
        found.append(f"has too much or too little: {sorted(top ^ SOURCES)}")
    junk = [str(path) for path in files if path.suffix in NOT_SOURCE]
    if junk:
        found.append(f"has files that are no source: {junk}")
    return metadata, found


def metadata_problems(metadata: Message) -> Iterator[str]:
    """What an index page would lack."""
    for field in ("Author", "License-Expression", "Requires-Python", "Description-Content-Type"):
        if not metadata[field]:
            yield f"its metadata lacks {field}"
    urls = [line.partition(",")[0] for line in metadata.get_all("Project-URL", [])]
    for label in ("Homepage", "Documentation", "Issues", "Changelog"):
        if label not in urls:
            yield f"its metadata has no link {label}"
    yield from repeated(metadata.get_all("Requires-Dist", []))
    description = metadata.get_payload()
    assert isinstance(description, str)
    if not description.strip():
        yield "its page is empty"
    for link in links(description):
        if not link.startswith(LEADS_SOMEWHERE):
            yield f"its page links to {link}, which is not there on an index"


def repeated(requirements: list[str]) -> Iterator[str]:
    """Dependencies that stand in one list twice; `matplotlib; extra == "dev"` is of another."""
    seen = set()
    for requirement in requirements:
        text, _, marker = requirement.partition(";")
        name = re.split(r"[^\w.-]", text.strip(), maxsplit=1)[0].lower().replace("_", "-")
        if (name, marker.strip()) in seen:
            yield f"it lists {name} twice ({marker.strip() or 'among its dependencies'})"
        seen.add((name, marker.strip()))


def links(markdown: str) -> list[str]:
    """Where a page links to, code aside."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", markdown, flags=re.S)
    return [first or second for first, second in LINK.findall(text)]


def tag_problems(tag: str, metadata: Message) -> Iterator[str]:
    """What is wrong with a release: its tag, or that the repository's address is not known yet."""
    version = metadata["Version"]
    if tag and tag != f"v{version}":
        yield f"is version {version}, and the tag is {tag}"
    if tag and PLACEHOLDER in metadata.as_string():
        yield f"has {PLACEHOLDER} for the repository's address: `make address URL=https://...`"


def release_problems(root: Path, version: str) -> Iterator[str]:
    """What is wrong with the repository for a release of this version."""
    dated = rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$"
    if not re.search(dated, (root / "CHANGELOG.md").read_text(), re.M):
        yield f"CHANGELOG.md has no dated section: ## {version} (YYYY-MM-DD)"

    def files_with(*pattern: str) -> set[str]:
        command = [
            "git",
            "grep",
            "--name-only",
            *pattern,
            "--",
            ".",
            ":!tools",
            ":!docs",
            ":!tests",
        ]
        return set(subprocess.run(command, cwd=root, capture_output=True, text=True).stdout.split())

    for file in sorted(files_with("-F", PLACEHOLDER) - {*ADDRESSED, "Makefile"}):
        yield f"{file} has {PLACEHOLDER}, and `make address` does not change it"
    for file in sorted(files_with("-E", INVENTED)):
        yield f"{file} has an address that nobody has chosen: write {PLACEHOLDER}/unisono"


def main() -> None:
    """Exit with 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tag", default="", help="the release's tag: v and the version")
    parser.add_argument("--release", action="store_true", help="look at the repository, too")
    arguments = parser.parse_args()
    found = list(problems(arguments.folder, arguments.tag))
    if arguments.release:
        root = Path(__file__).resolve().parents[1]
        (source,) = arguments.folder.glob("*.tar.gz")
        found += release_problems(root, read_source(source)[0]["Version"])
    for problem in found:
        print(problem, file=sys.stderr)
    if found:
        raise SystemExit(1)
    for package in sorted(arguments.folder.iterdir()):
        tagged = WHEEL_NAME.fullmatch(package.name)
        needs = f", glibc {glibc(tagged[1])} or later" if tagged else ""
        print(f"{package.name}: {package.stat().st_size / 1000:.0f} kB{needs}")
    for machine in MACHINES if arguments.release else ():
        if not list(arguments.folder.glob(f"*_{machine}.whl")):
            print(f"no wheel for {machine} here: the workflow packages.yml builds it")


if __name__ == "__main__":
    main()
