"""Rows as a table in a terminal, as Markdown and as JSON.

A heading that begins with "<" is that of names, one with ">" that of numbers, which stand to the
right; neither is broken into lines. The words below any other heading wrap.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from itertools import chain, repeat
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

Cell = str | Text

LINED: dict[str, Any] = {"box": SIMPLE_HEAD, "pad_edge": False, "padding": (0, 1, 0, 0)}
BARE: dict[str, Any] = {"box": None, "pad_edge": False, "header_style": "dim"}
"""Looks of a table: a line below the headings, or none."""


@dataclass(frozen=True)
class Column:
    """A column of a table that is shown in several ways: its heading, how a value in it is shown,
    how wide a terminal must be for it, and what it means."""

    heading: str
    show: Callable[[Any], str] = str
    least_width: int = 0
    meaning: str = ""


def name_of(heading: str) -> str:
    return heading.lstrip("<>")


def build_table(
    headings: Iterable[str], rows: Iterable[Sequence[Cell]], styles: Iterable[str] = (), **look: Any
) -> Table:
    """A table for a terminal. An empty row is a line across it; `styles` are the rows', and `look`
    is what rich's Table takes."""
    table = Table(**look)
    for heading in headings:
        is_whole = heading.startswith(("<", ">"))
        table.add_column(
            name_of(heading),
            justify="right" if heading.startswith(">") else "left",
            no_wrap=is_whole,
            overflow="ellipsis" if is_whole else "fold",
        )
    for row, style in zip(rows, chain(styles, repeat("")), strict=False):
        if row:
            cells = (Text(cell) if isinstance(cell, str) else cell for cell in row)
            table.add_row(*cells, style=style)
        else:
            table.add_section()
    return table


def print_whole(console: Console, table: Table) -> None:
    """Print a table in full, even if it is wider than the terminal."""
    any_width = console.options.update(max_width=10_000)
    width = max(console.width, Measurement.get(console, any_width, table).maximum)
    Console(file=console.file, highlight=False, width=width).print(table)


def to_markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The same as Markdown."""
    rules = ("---:" if heading.startswith(">") else "---" for heading in headings)
    lines = (map(name_of, headings), rules, *rows)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def to_json(value: object, indent: int = 2) -> str:
    """Any value as JSON: a dataclass by its fields, a path as text."""
    return json.dumps(value, indent=indent, default=_plain)


def _plain(value: Any) -> Any:
    is_row = is_dataclass(value) and not isinstance(value, type)
    return asdict(value) if is_row else os.fspath(value)
