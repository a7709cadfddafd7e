"""A run on a terminal: its progress, and one table per collective as soon as it is measured."""

import time
from collections.abc import Sequence
from itertools import compress
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from unisono.bench import text
from unisono.bench.results import Row, Run, by_collective, by_size
from unisono.bench.session import Event, apply_event
from unisono.show.table import LINED, build_table

PLAIN_WIDTH = 150
"""Columns without a terminal: in a pipe, a file, a log."""


class Show:
    """Collects the events of a run, and shows it."""

    def __init__(self, console: Console) -> None:
        if not console.is_terminal:
            console.width = PLAIN_WIDTH
        self.console = console
        self.run: Run | None = None
        self._shown = 0
        self._next: Event | None = None
        self._begin_s = time.monotonic()
        # Refreshed by events only: a drawing thread would disturb the measurement.
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._print_rest()
        self._live.update(Text(""), refresh=True)
        self._live.stop()

    def handle_event(self, event: Event) -> None:
        if event["event"] == "next":
            if self._next is None or event["collective"] != self._next["collective"]:
                self._print_rest()
                if not self.console.is_terminal:
                    self.console.print(f"measuring {event['collective']} ...")
            self._next = event
        else:
            self.run = apply_event(self.run, event)
            if event["event"] == "begin":
                self.print_line(text.about(self.run))
                for skipped in self.run.skipped:
                    self.console.print(f"{skipped}", style="yellow", highlight=False, markup=False)
        self._live.update(self._progress(), refresh=self.console.is_terminal)

    def print_line(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False)

    # -- parts ---------------------------------------------------------------------------------

    def _print_rest(self) -> None:
        """The tables of what has been measured but not finally shown."""
        if self.run is None:
            return
        new = self.run.rows[self._shown :]
        self._shown = len(self.run.rows)
        for rows in by_collective(new):
            self.console.print(table(rows, self.console.width))

    def _progress(self) -> Text:
        if self._next is None:
            return Text("")
        done, of = self._next["done"], self._next["of"]
        gone_s = time.monotonic() - self._begin_s
        left = f", about {gone_s / done * (of - done):.0f} s left" if done else ""
        return Text(f"{self._next['what']}: row {done + 1} of {of}{left}", style="dim")


def table(rows: Sequence[Row], width: int) -> Table:
    kept = [width >= column.least_width for column in text.COLUMNS]
    lines, styles = [], []
    for of_size in by_size(rows):
        for row in of_size:
            cells = [shown for _, shown in text.cells(row, of_size[0])]
            if row is not of_size[0]:
                cells[0] = cells[1] = ""
            lines.append([*compress(cells, kept)])
            is_slow = row.verdict.startswith("slow")
            styles.append("bold red" if row.wrong else "yellow" if is_slow else "")
    heads = [column.heading for column in compress(text.COLUMNS, kept)]
    look = {**LINED, "title_justify": "left", "title_style": "bold"}
    return build_table(heads, lines, styles, title=text.title(rows), **look)
