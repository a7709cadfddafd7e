"""The packages' metadata, and that the checks of packages would detect mistakes."""

from __future__ import annotations

import email
import re
import runpy
import subprocess
import tarfile
import tomllib
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import unisono

ROOT = Path(__file__).parent.parent


def tool(name: str) -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(ROOT / f"tools/{name}.py")))


checks = tool("check_packages")
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_one_version_everywhere() -> None:
    (in_cmake,) = re.findall(
        r"^project\(unisono VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text(), re.M
    )
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert cited is not None
    assert PYPROJECT["project"]["version"] == in_cmake == unisono.__version__ == cited[1]


def test_no_dependency_is_listed_twice() -> None:
    project = PYPROJECT["project"]
    for listed in (project["dependencies"], *project["optional-dependencies"].values()):
        assert list(checks.repeated(listed)) == []
    assert list(checks.repeated(["numpy", "Matplotlib>=3", "matplotlib"]))
    assert not list(checks.repeated(['matplotlib; extra == "a"', 'matplotlib; extra == "b"']))


def test_every_dependency_has_its_version_in_the_constraints() -> None:
    """So that what the repository installs does not change by itself."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0] for line in lines if "==" in line}
    assert len(pinned) == sum("==" in line for line in lines)
    project = PYPROJECT["project"]
    listed = [*PYPROJECT["build-system"]["requires"], *project["dependencies"]]
    listed += [name for extra in project["optional-dependencies"].values() for name in extra]
    assert {re.split(r"[^\w-]", requirement)[0] for requirement in listed} <= pinned


def test_the_page_of_an_index_has_the_readme_with_links_that_lead_somewhere() -> None:
    page = (ROOT / "README.md").read_text()
    relative = [link for link in checks.links(page) if not link.startswith(checks.LEADS_SOMEWHERE)]
    assert relative
    for link in relative:
        assert (ROOT / link.partition("#")[0]).exists(), link
    home = PYPROJECT["project"]["urls"]["Homepage"]
    for rule in PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"][
        "substitutions"
    ]:
        page = re.sub(rule["pattern"], rule["replacement"], page)
    assert all(link.startswith(checks.LEADS_SOMEWHERE) for link in checks.links(page))
    assert f"]({home}/blob/main/{relative[0]})" in page


def metadata(*lines: str, page: str = "# unisono\n") -> str:
    fields = [
        "Version: 1.2.3",
        "Author: somebody",
        "License-Expression: Apache-2.0",
        "Requires-Python: >=3.11",
        "Description-Content-Type: text/markdown",
        *(
            f"Project-URL: {name}, x"
            for name in ("Homepage", "Documentation", "Issues", "Changelog")
        ),
        *lines,
    ]
    return "\n".join(fields) + f"\n\n{page}"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (metadata(page="[docs](docs/torch.md)"), "links to docs/torch.md"),
        (metadata(page='<img src="docs/images/a.svg">'), "links to docs/images/a.svg"),
        (metadata("Requires-Dist: numpy", "Requires-Dist: NumPy>=2"), "lists numpy twice"),
        (metadata().replace("Author: somebody\n", ""), "lacks Author"),
        (metadata().replace("Issues", "Bugs"), "no link Issues"),
        (metadata(page=" \n"), "page is empty"),
    ],
)
def test_mistakes_in_metadata_are_found(text: str, problem: str) -> None:
    (found,) = checks.metadata_problems(email.message_from_string(text))
    assert problem in found


def test_a_release_needs_the_repositorys_address() -> None:
    unknown = email.message_from_string(metadata(f"Project-URL: Homepage, {checks.PLACEHOLDER}/x"))
    assert list(checks.tag_problems("", unknown)) == []
    assert "make address" in next(checks.tag_problems("v1.2.3", unknown))
    known = email.message_from_string(metadata("Project-URL: Homepage, https://host/x"))
    assert list(checks.tag_problems("v1.2.3", known)) == []


def test_a_release_needs_a_dated_changelog_and_no_invented_address(tmp_path: Path) -> None:
    assert list(checks.release_problems(ROOT, unisono.__version__)) == []
    (undated,) = checks.release_problems(ROOT, "9.9.9")
    assert "CHANGELOG.md has no dated section: ## 9.9.9 (YYYY-MM-DD)" in undated
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    (tmp_path / "CHANGELOG.md").write_text(f"## 1.0 (2026-01-01)\n{checks.PLACEHOLDER}/x\n")
    (tmp_path / "README.md").write_text("https://github.com/owner/unisono\n")
    subprocess.run(["git", "-C", tmp_path, "add", "."], check=True)
    placeholder, invented = checks.release_problems(tmp_path, "1.0")
    assert placeholder.startswith("CHANGELOG.md has https://example.invalid")
    assert invented.startswith("README.md has an address that nobody has chosen")


def test_good_metadata_is_passed() -> None:
    text = metadata("Requires-Dist: numpy", page="[a](https://b) [c](#d) `[e](f)`")
    assert list(checks.metadata_problems(email.message_from_string(text))) == []


def packages(folder: Path, wheel: str, files: list[str], sources: list[str]) -> list[str]:
    """The problems of a wheel with these files and a source package with those."""
    with zipfile.ZipFile(folder / wheel, "w") as archive:
        archive.writestr("unisono-1.2.3.dist-info/METADATA", metadata())
        for name in files:
            archive.writestr(name, "")
    empty, info = folder / "empty", folder / "info"
    empty.write_text("")
    info.write_text(metadata())
    with tarfile.open(folder / "unisono-1.2.3.tar.gz", "w:gz") as source:
        for name in sources:
            source.add(info if name == "PKG-INFO" else empty, f"unisono-1.2.3/{name}")
    empty.unlink()
    info.unlink()
    return [problem.partition(": ")[2] for problem in checks.problems(folder, "v1.2.3")]


GOOD_WHEEL = "unisono-1.2.3-cp311-abi3-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl"
GOOD_FILES = [
    "unisono/_native.abi3.so",
    "unisono/py.typed",
    "unisono/show/assets/page.css",
    "unisono-1.2.3.dist-info/licenses/LICENSE",
    *(f"unisono/learn/chapters/course-{number:02}-x.md" for number in range(checks.CHAPTERS)),
    *(f"unisono/learn/solutions/chapter_{number:02}.py" for number in range(checks.CHAPTERS)),
]


def test_good_packages_are_passed(tmp_path: Path) -> None:
    assert packages(tmp_path, GOOD_WHEEL, GOOD_FILES, sorted(checks.SOURCES)) == []
    assert checks.glibc(GOOD_WHEEL) == "2.27"
    assert [
        problem for problem in checks.problems(tmp_path, "v2.0") if "the tag is v2.0" in problem
    ]


def test_mistakes_in_packages_are_found(tmp_path: Path) -> None:
    found = packages(
        tmp_path,
        "unisono-1.2.3-cp311-cp311-linux_x86_64.whl",
        ["unisono/_native.abi3.so", "unisono/libother.so.2", "tests/test_x.py"],
        sorted({*checks.SOURCES, "tests", "src/picture.png"} - {"csrc"}),
    )
    assert len(found) == 10
    assert "['csrc', 'tests']" in found[0]
    assert "src/picture.png" in found[1]
    assert "auditwheel" in found[2]
    assert "libother.so.2" in found[3]
    assert "py.typed" in found[4]
    assert "show/assets" in found[5]
    assert "learn/chapters" in found[6]
    assert "learn/solutions" in found[7]
    assert "licence" in found[8]
    assert "'tests'" in found[9]


def test_a_package_that_is_too_large_is_found(tmp_path: Path) -> None:
    packages(tmp_path, GOOD_WHEEL, GOOD_FILES, sorted(checks.SOURCES))
    with (tmp_path / GOOD_WHEEL).open("rb+") as file:
        good = file.read()
        file.seek(0)
        file.write(bytes(checks.MOST_BYTES) + good)  # a zip file is read from its end
    (found,) = checks.problems(tmp_path)
    assert "too many" in found


def test_steps_of_workflows_are_targets_of_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    steps = []
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        text = path.read_text()
        steps += re.findall(r"^\s*- run: (.*)$", text, re.M)
        assert len(re.findall(r"\brun:", text)) == len(re.findall(r"^\s*- run: make ", text, re.M))
        for line in re.findall(r"^\s*target: \[(.*)\]$", text, re.M):
            steps += [f"make {name.strip(chr(34))}" for name in line.split(", ")]
    named = {step.split()[1] for step in steps} - {"${{"}
    assert {"check", "test", "sdist", "wheels"} <= named
    assert named <= targets


def test_the_tools_find_the_programs_of_the_readme() -> None:
    ten_lines, torch_line = tool("try_wheel").programs()
    assert "unisono.launch(work, ranks=4)" in ten_lines.text
    assert 'dist.init_process_group("unisono")' in torch_line.text


def test_contributing_lists_every_target() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    targets = re.findall(r"^([a-z-]+):.* ## ", (ROOT / "Makefile").read_text(), re.M)
    listed = re.findall(r"^\| `make ([a-z-]+)` \|", text, re.M)
    assert sorted(listed) == sorted(set(targets) - {"help"})
    assert [line for line in text.splitlines() if len(line) > 100] == []
