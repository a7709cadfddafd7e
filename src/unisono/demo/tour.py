"""The tour: pictures, the race, and the file that keeps both."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from importlib.metadata import version
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

from unisono.demo.drawing import WIDTH, draw, draw_barrier, draw_faults, legend, plain
from unisono.demo.race import Lap, race, row, table
from unisono.demo.scenes import SCENES, check, run_all_scenes
from unisono.launcher.functions import launch
from unisono.requirements import require_torch


def run_demo(
    ranks: int,
    path: Path,
    console: Console,
    *,
    pictures: bool = True,
    racing: bool = True,
    budget_s: float = 10.0,
) -> None:
    """Show the primitives on `ranks` ranks, race gloo on two, and write both to `path`.

    Raises WrongResult if a rank has another value than arithmetic says, TorchMissing if there is
    no torch for the race.
    """
    if racing:
        require_torch("the race with gloo (--only pictures leaves it out)")
    start = time.perf_counter()
    drawn: list[list[Text]] = []
    laps: Sequence[Lap] = ()
    if pictures:
        console.print(f"[bold]unisono[/]: {ranks} processes of this machine over shared memory\n")
        drawn = pictures_of(ranks)
        for picture in drawn:
            _show(picture, console)
        console.print("Every number was compared with plain arithmetic: all are right.\n")
    if racing:
        console.print(f"all_reduce of float32 on 2 ranks, in turns with gloo ({budget_s:g} s) ...")
        laps = race(budget_s)
        console.print(table(laps))
    path.write_text(_page(drawn, laps, ranks))
    console.print(f"wrote {path} ({time.perf_counter() - start:.0f} s in all)")


def pictures_of(ranks: int) -> list[list[Text]]:
    """Run everything on new ranks, check it, and draw it."""
    outcomes = launch(run_all_scenes, ranks, threads=1)
    check(outcomes)
    return [
        [legend(ranks)],
        *(draw(number, outcomes) for number in range(len(SCENES))),
        draw_barrier(outcomes),
        draw_faults(outcomes),
    ]


def _show(picture: Sequence[Text], console: Console) -> None:
    ascii_only = not (console.encoding or "").lower().startswith("utf")
    for line in picture:
        console.print(Text(plain(line.plain)) if ascii_only else line)
    console.print()


def _page(drawn: Sequence[Sequence[Text]], laps: Sequence[Lap], ranks: int) -> str:
    facts = [platform.machine(), f"{os.cpu_count()} cores", f"Python {platform.python_version()}"]
    if laps:
        facts.append(f"torch {version('torch')}")
    lines = [
        "# unisono on this machine",
        "",
        ", ".join(facts) + ". Written by `unisono demo`.",
    ]
    if drawn:
        lines += ["", f"## The primitives on {ranks} ranks", "", "```"]
        console = Console(file=StringIO(), width=WIDTH, color_system=None)
        with console.capture() as text:
            for picture in drawn:
                _show(picture, console)
        lines += [line.rstrip() for line in text.get().splitlines()]
        lines += ["```"]
    if laps:
        lines += ["", "## all_reduce of float32 on 2 ranks, median of one call", ""]
        lines += ["| bytes | unisono us | gloo us | times faster |", "|---|---|---|---|"]
        lines += ["| " + " | ".join(row(lap)) + " |" for lap in laps]
    return "\n".join(lines) + "\n"
