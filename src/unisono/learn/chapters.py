"""The chapters of the course, for a terminal and for a browser, with pictures drawn now.

In a clone they are docs/course-*.md, in a wheel files of this package; solutions likewise. A
chapter contains its exercise: the block after `<!-- exercise: chapter_01.py -->`.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from unisono.learn import pictures
from unisono.plan import PRESETS, Schedule, find
from unisono.plan.player import schedule_page
from unisono.show.pages import Html, build_page, element, in_frame

_HERE = Path(__file__).resolve().parent
_CLONE = _HERE.parents[2]
_IS_CLONE = (_CLONE / "docs").is_dir() and (_CLONE / "examples").is_dir()
_CHAPTERS = _CLONE / "docs" if _IS_CLONE else _HERE / "chapters"
SOLUTIONS = _CLONE / "examples/course" if _IS_CLONE else _HERE / "solutions"

_COMMENTS = re.compile(r"^<!--.*?-->\n", re.M | re.S)
_PICTURE = re.compile(r"^<!-- picture: ([\w-]+) -->$", re.M)
_PLAYER = re.compile(r"play(er|s)-(\w+)-(\w+)-(\d+)")
_EXERCISE = re.compile(r"^<!-- exercise: \S+ -->\n```python\n(.*?)^```$", re.M | re.S)
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")
_CHAPTER_FILE = re.compile(r"course-(\d\d)-[\w-]+\.md(?:#.*)?")
_PLAYER_HEIGHT_PX = 860


@dataclass(frozen=True)
class Chapter:
    """A chapter: its number, title and text, which is Markdown."""

    number: int
    title: str
    text: str

    @property
    def exercise(self) -> str:
        """What the reader begins with."""
        found = _EXERCISE.search(self.text)
        assert found is not None, f"chapter {self.number} has no exercise"
        return f'"""{self.title}"""\n\n{found[1]}'

    @property
    def solution(self) -> str:
        return (SOLUTIONS / f"chapter_{self.number:02}.py").read_text(encoding="utf-8")

    def for_terminal(self) -> str:
        """Markdown without links, where pictures are text."""

        def draw(found: re.Match[str]) -> str:
            if found[1] in pictures.ALGORITHMS:
                return f"```text\n{pictures.as_text(found[1])}\n```"
            player = _PLAYER.fullmatch(found[1])
            if player is None or player[1] != "s":  # a picture of a run, or one beside another
                return ""
            return f"```text\n{_schedule_of(*player.groups()[1:])}\n```"

        return _COMMENTS.sub("", _LINK.sub(r"\1", _PICTURE.sub(draw, self.text)))

    def page(self) -> str:
        """A page of one file, whose links lead to the other chapters' pages beside it."""
        from markdown_it import MarkdownIt

        def link(found: re.Match[str]) -> str:
            chapter = _CHAPTER_FILE.fullmatch(found[2])
            return f"[{found[1]}]({page_name(int(chapter[1]))})" if chapter else found[1]

        text = _COMMENTS.sub("", _PICTURE.sub(_draw_for_page, _LINK.sub(link, self.text)))
        body = MarkdownIt("commonmark", {"html": True}).enable("table").render(text)
        body = body.replace("<table>", '<div class="scroll"><table>')
        body = body.replace("</table>", "</table></div>")
        return build_page(self.title, [element("main", Html(body))], ["picture.css", "learn.css"])


def page_name(number: int) -> str:
    """The file of a chapter's page."""
    return f"chapter_{number:02}.html"


@cache
def chapters() -> tuple[Chapter, ...]:
    """All chapters, in order."""
    return tuple(_read(sorted(_CHAPTERS.glob("course-*.md"))))


def _read(files: Iterable[Path]) -> Iterable[Chapter]:
    for number, file in enumerate(files, 1):
        text = file.read_text(encoding="utf-8")
        yield Chapter(number, text.partition("\n")[0].removeprefix("# "), text)


def _schedule_of(collective: str, algorithm: str, ranks: str) -> Schedule:
    size = int(ranks)
    pieces = 4 if size > pictures.RANKS else 1
    return find(collective, algorithm).schedule(size, node_size=size // 2, pieces=pieces)


def _draw_for_page(found: re.Match[str]) -> str:
    if found[1] in pictures.ALGORITHMS:
        return pictures.as_svg(found[1])
    player = _PLAYER.fullmatch(found[1])
    if player is None:  # of a run, which the text describes as well
        return ""
    title = f"{player[2]} by {player[3]}, step by step"
    page = schedule_page(_schedule_of(*player.groups()[1:]), PRESETS["h100"])
    frame = in_frame(page, _PLAYER_HEIGHT_PX, title).replace("\n", "&#10;")
    opened = " open" if player[1] == "s" else ""
    return f"<details{opened}><summary>{title}</summary>{frame}</details>"
