"""The markdown files of the repository as pages of the site.

The files stay as a code host shows them. Here their links are led to pages of the site, programs
that they link to become pages, and comments of the form `<!-- picture: NAME -->` become pictures.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

_LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")
_PICTURE = re.compile(r"^<!-- picture: ([\w-]+) -->$", re.M)
_PLOTS = re.compile(r"^(?:!\[[^\]]*\]\(plots/[^)]+\.svg\) ?)+$", re.M)
_PLOT = re.compile(r"\((plots/[^)]+)\)")
_STYLE = re.compile(r"<style>.*?</style>")
_NAMED_BY_FILE = re.compile(r"\[([\w./-]+\.md)\](?=\(\1[)#])")
_FENCE = re.compile(r"(^```.*?^```$)", re.M | re.S)
_ITEM = re.compile(r"^- \[([^\]]*)\]\(([^)#]+\.md)\)", re.M)
_UNLISTED = "---\norphan: true\n---\n\n"
"""How a page begins that has no place in the margin."""
_MOVED = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples/index.md",
}
"""Files outside docs/, and what they are on the site."""

Pages = dict[str, dict[str, str]]
"""Titles of pages by their names, by the heading under which they stand."""


class BadSource(Exception):
    """A file of the repository is not fit for the site."""


def write_pages(root: Path, source: Path, pictures: Mapping[str, str]) -> None:
    """Write every page but the start page below `source`.

    Raises BadSource for a link that leads nowhere, or a picture that nobody has drawn.
    """
    files = sorted((root / "docs").glob("*.md")) + [root / name for name in _MOVED]
    programs: set[str] = set()
    for file in files:
        name = file.relative_to(root).as_posix()
        if name in ("README.md", "docs/index.md"):
            continue
        text = _with_pictures(file.read_text(), pictures, name, root)
        if file.name.startswith("course-"):
            notebook = f"_static/notebooks/{file.stem}.ipynb"
            text += f'\n<p><a href="{notebook}" download>This chapter as a notebook</a></p>\n'
        _write(source / page_of(name), with_site_links(text, name, root, programs))
    for picture in (root / "docs/images").iterdir():
        _write(source / "images" / picture.name, picture.read_bytes())
    static = Path(__file__).parent / "static"
    for asset in static.iterdir():
        _write(source / "_static" / asset.name, asset.read_bytes())
    for program in sorted(programs):
        _write(source / page_of(program), _program_page(root / program))


def write_start_page(
    root: Path, source: Path, names: Iterable[str], pictures: Mapping[str, str]
) -> None:
    """Write the start page: docs/index.md up to `<!-- contents -->`. The lists after it are the
    site's table of contents, which stands in the margin; the reference, the pages `names`, comes
    before "Understanding". Raises BadSource for a page that no list has."""
    text, _, contents = (root / "docs/index.md").read_text().partition("<!-- contents -->\n")
    text = _with_pictures(text, pictures, "docs/index.md", root)
    pages: Pages = {}
    for section in contents.split("\n## ")[1:]:
        heading = section.partition("\n")[0]
        if heading == "Understanding":
            pages["Reference"] = {name: title_of(source / f"{name}.md") for name in names}
        pages[heading] = {
            page_of(_resolve("docs/index.md", file)).removesuffix(".md"): title
            for title, file in _ITEM.findall(section)
        }
    _check_that_all_are_listed(source, pages)
    text = with_site_links(text, "docs/index.md", root, set())
    for heading, entries in pages.items():
        lines = "".join(f"{title} <{name}>\n" for name, title in entries.items())
        text += f"\n```{{toctree}}\n:hidden:\n:caption: {heading}\n\n{lines}```\n"
    _write(source / "index.md", text)


def _check_that_all_are_listed(source: Path, pages: Pages) -> None:
    known = {name for entries in pages.values() for name in entries}
    for page in sorted(source.rglob("*.md")):
        name = page.relative_to(source).with_suffix("").as_posix()
        is_ours = name in known or name.startswith("reference/")
        if not is_ours and not page.read_text().startswith(_UNLISTED):
            raise BadSource(f"docs/index.md lists every page but {name}.md")


def page_of(name: str) -> str:
    """The page that a file or folder of the repository is on the site: docs/a.md is a.md."""
    if name in _MOVED:
        return _MOVED[name]
    name = name.removeprefix("docs/")
    return name if name.endswith(".md") else f"{name.removesuffix('.py')}.md"


def with_site_links(text: str, name: str, root: Path, programs: set[str]) -> str:
    """The text of file `name` with links to pages of the site, which are called by their titles
    where the text has the file's name; adds the programs that it links to.

    Raises BadSource for a link to a file that does not exist.
    """
    here = posixpath.dirname(page_of(name))

    def lead(found: re.Match[str]) -> str:
        target = _resolve(name, found[1])
        if not (root / target).exists():
            raise BadSource(f"{name} links to {found[1]}, which does not exist")
        if target.endswith((".svg", ".png")):
            page = target.removeprefix("docs/")
        else:
            page = page_of(target)
            if not target.endswith(".md"):
                programs.add(target)
        return posixpath.relpath(page, here or ".") + (found[2] or "")

    def entitle(found: re.Match[str]) -> str:
        page = root / _resolve(name, found[1])
        return f"[{title_of(page)}]" if page.exists() else found[0]

    parts = _FENCE.split(_NAMED_BY_FILE.sub(entitle, text))
    return "".join(part if part.startswith("```") else _LINK.sub(lead, part) for part in parts)


def _resolve(name: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(name), link))


def _with_pictures(text: str, pictures: Mapping[str, str], name: str, root: Path) -> str:
    """The text with the pictures that it asks for, and with plots in the page itself, where they
    have the page's colours."""

    def put_plots(found: re.Match[str]) -> str:
        drawn = [(root / "docs" / file).read_text().strip() for file in _PLOT.findall(found[0])]
        return f'<div class="plots">{_STYLE.sub("", "".join(drawn))}</div>'

    text = _PICTURE.sub(lambda found: _picture(found[1], pictures, name), text)
    return _PLOTS.sub(put_plots, text)


def _picture(wanted: str, pictures: Mapping[str, str], name: str) -> str:
    if wanted not in pictures:
        raise BadSource(f"{name} asks for the picture {wanted}; there are {', '.join(pictures)}")
    return pictures[wanted]


def title_of(page: Path) -> str:
    return page.read_text().partition("\n")[0].removeprefix("# ")


def _program_page(path: Path) -> str:
    files = [path] if path.is_file() else sorted(path.glob("*.py"))
    blocks = [f"```python\n{file.read_text()}```\n" for file in files]
    if path.is_file():
        return f"{_UNLISTED}# {path.name}\n\n{blocks[0]}"
    sections = [f"## {file.name}\n\n{block}" for file, block in zip(files, blocks, strict=True)]
    return f"{_UNLISTED}# {path.name}\n\n" + "\n".join(sections)


def _write(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
