"""The chapters of the course as notebooks, each made from its page.

Text becomes text, and programs become cells: one that runs on ranks is wrapped in `unisono.launch`,
a file is written by `%%writefile`, shell commands follow `!`, and a player is a schedule, which
plays in a notebook. What a program prints is left out, as running the cell shows it. Links lead to
other chapters; those to other pages become text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Cell = dict[str, Any]

_BLOCK = re.compile(
    r"(?P<marks>(?:^<!--(?:(?!-->).)*-->\n)*)^```(?P<language>\w+)\n(?P<text>.*?)^```$\n?",
    re.M | re.S,
)
_COMMENT = re.compile(r"^<!--.*?-->\n?", re.M | re.S)
_PLAYER = re.compile(r"^<!-- picture: play\w+-(\w+)-(\w+)-(\d+) -->$", re.M)
_CHAPTER = re.compile(r"\]\((course-[\w-]+)\.md\)")
_OTHER = re.compile(r"\[([^\]]*)\]\([^)]*(?:\.md|\.py)[^)]*\)")
_FIRST = "# unisono has to be installed: `pip install .` in a clone\nimport torch\nimport unisono"


def write_all(docs: Path, folder: Path) -> list[Path]:
    """Write the notebook of every chapter in `docs` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for page in sorted(docs.glob("course-*.md")):
        notebook = folder / f"{page.stem}.ipynb"
        notebook.write_text(json.dumps(notebook_of(page.read_text()), indent=1) + "\n")
        written.append(notebook)
    return written


def notebook_of(page: str) -> dict[str, Any]:
    """A page as a notebook, of format 4."""
    cells = list(_cells(page))
    cells.insert(1, _cell("code", _FIRST))
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 4}


def _cells(page: str) -> Iterator[Cell]:
    end = 0
    for block in _BLOCK.finditer(page):
        yield from _text(page[end : block.start()])
        end = block.end()
        if block["language"] != "text":
            yield _cell("code", _code(block["language"], block["marks"], block["text"].rstrip()))
    yield from _text(page[end:])


def _text(text: str) -> Iterator[Cell]:
    words = _PLAYER.split(text)
    for at in range(0, len(words), 4):
        if plain := _COMMENT.sub("", words[at]).strip():
            yield _cell("markdown", _OTHER.sub(r"\1", _CHAPTER.sub(r"](\1.ipynb)", plain)))
        if at + 1 < len(words):
            collective, algorithm, ranks = words[at + 1 : at + 4]
            schedule = f'plan.find("{collective}", "{algorithm}").schedule({ranks})'
            yield _cell("code", f"from unisono import plan\n\n{schedule}")


def _code(language: str, marks: str, text: str) -> str:
    if "not run:" in marks:
        return "\n".join(f"# {line}".rstrip() for line in text.splitlines())
    if file := re.search(r"<!-- (?:file|exercise): (\S+)", marks):
        return f"%%writefile {file[1]}\n{text}"
    if language == "sh":
        return "\n".join(f"!{line}" for line in text.splitlines())
    if ranks := re.search(r"<!-- ranks: (\d+)", marks):
        body = "\n".join(f"    {line}".rstrip() for line in text.splitlines())
        work = f"def work():\n    comm = unisono.init()\n{body}\n"
        return f"{work}\n\nunisono.launch(work, ranks={ranks[1]});"
    return text


def _cell(kind: str, text: str) -> Cell:
    cell: Cell = {"cell_type": kind, "metadata": {}, "source": text.splitlines(keepends=True)}
    return cell if kind == "markdown" else {**cell, "execution_count": None, "outputs": []}
