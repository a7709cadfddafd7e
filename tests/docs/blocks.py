"""The code blocks of the markdown files, and the comments before them that say how they run.

A comment is on the line before its block, or several on the lines before:

    <!-- not run: WHY -->         nobody runs it
    <!-- exercise: chapter_01.py --> what the course hands out: tests/docs/test_course.py runs it
    <!-- ranks: 4 -->             Python, on each of so many ranks, with `comm`, `torch`, `numpy`
    <!-- run: unisono run -n 2 -->  Python, as a program that the command is given
    <!-- file: train.py -->       a file, which a later block of the page runs
    <!-- then: CODE -->           Python that runs after a block on ranks, and checks what it says
    <!-- prints: TEXT -->         what a Python block prints
    <!-- printed by: ... -->      text: what the Python code in the comment prints
    <!-- output of: ... -->       text: lines that the shell commands in the comment write, in order
    <!-- exit code: 1 -->         of the last command of a shell block
    <!-- output: some lines -->   the output of a shell block has others between those shown
    <!-- setup: ... -->           shell commands before those of a shell block

Python without a comment runs in one process. The further lines of `ranks` and `run` are code that
goes before the block; those of `not run` say more. Text right behind a block that runs is its
output; `...` in it stands for anything.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = (
    "README.md",
    "examples/README.md",
    *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md")),
)
PAGES = tuple(sorted(FILES))

_BLOCK = re.compile(
    r"(?P<comments>(?:^<!--(?:(?!-->).)*-->\n)*)^```(?P<language>[^\n]*)\n(?P<text>.*?)^```$",
    re.M | re.S,
)
_COMMENT = re.compile(r"<!-- ?(.*?) ?-->", re.S)
KNOWN = (
    "not run", "ranks", "then", "run", "file", "prints", "printed by", "output of", "exit code",
    "output", "setup", "exercise",
)  # fmt: skip


@dataclass(frozen=True)
class Block:
    """A block, and its comments: by name, with their further lines."""

    page: str
    line: int
    language: str
    text: str
    marks: dict[str, str] = field(hash=False)
    follows: bool
    """Whether nothing is between it and the block before."""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    def __str__(self) -> str:
        return self.place


def blocks_of(page: str) -> list[Block]:
    """The blocks of a page, in order."""
    text = (ROOT / page).read_text()
    found, end = [], -1
    for match in _BLOCK.finditer(text):
        marks = {}
        for comment in _COMMENT.findall(match["comments"]):
            name, _, value = comment.partition(":")
            marks[name.strip()] = value.removeprefix(" ")
        line = text.count("\n", 0, match.start("language")) + 1
        follows = end >= 0 and not text[end : match.start()].strip()
        found.append(Block(page, line, match["language"].strip(), match["text"], marks, follows))
        end = match.end()
    return found


def output_of(block: Block, blocks: list[Block]) -> Block | None:
    """The text block that shows what `block` writes."""
    after = blocks[blocks.index(block) + 1 :][:1]
    if after and after[0].language == "text" and after[0].follows and not after[0].marks:
        return after[0]
    return None


def first_line(value: str) -> str:
    return value.partition("\n")[0].strip()


def further_lines(value: str) -> str:
    return value.partition("\n")[2]


def pattern_of(shown: str) -> str:
    """A regular expression for shown text, in which white space is one blank."""
    words = re.escape(" ".join(shown.split())).replace(re.escape("..."), ".*?")
    # Process ids, and how long ranks waited, which depends on the machine's load.
    return re.sub(r"(?<=pid\\ )\d+|\d{5,}|(?<=waiting\\ for\\ )\d+(?=\\ s)", r"\\d+", words)


def matches(shown: str, written: str) -> bool:
    """Whether everything that was written is as shown."""
    return re.fullmatch(pattern_of(shown), " ".join(written.split()), re.S) is not None


def lines_missing(shown: str, written: str) -> list[str]:
    """Lines that are shown but were not written, in this order."""
    rest = [" ".join(line.split()) for line in written.splitlines()]
    missing = []
    for line in filter(str.strip, shown.splitlines()):
        wanted = re.compile(pattern_of(line) + "$")
        at = next((number for number, other in enumerate(rest) if wanted.match(other)), None)
        if at is None:
            missing.append(line)
        else:
            rest = rest[at + 1 :]
    return missing
