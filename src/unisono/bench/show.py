"""A run on a terminal: its progress, and one table per collective as soon as it is measured."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import compress

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from unisono.bench import text
from unisono.bench.results import Row, Run
from unisono.bench.session import Event, apply_event

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

    def __enter__(self) -> Show:
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
            self._print_head()
        self._live.update(self._progress(), refresh=self.console.is_terminal)

    def print_line(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False)

    # -- parts ---------------------------------------------------------------------------------

    def _print_head(self) -> None:
        assert self.run is not None
        self.console.print(text.about(self.run), highlight=False, markup=False)
        for skipped in self.run.skipped:
            self.console.print(f"{skipped}", style="yellow", highlight=False, markup=False)

    def _print_rest(self) -> None:
        """The tables of what has been measured but not finally shown."""
        if self.run is None:
            return
        new = self.run.rows[self._shown :]
        self._shown = len(self.run.rows)
        for rows in text.tables(self.run, new):
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
    shown = Table(
        title=text.title(rows),
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for column in compress(text.COLUMNS, kept):
        left = column.heading in ("backend", "verdict")
        shown.add_column(column.heading, justify="left" if left else "right", no_wrap=True)
    for row in rows:
        first = text.first_of(rows, row)
        values = [shown for _, shown in text.cells(row, first)]
        if first is not row:
            values[0] = values[1] = ""
        style = "bold red" if row.wrong else "yellow" if row.verdict.startswith("slow") else ""
        shown.add_row(*compress(values, kept), style=style)
    return shown
