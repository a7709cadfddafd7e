"""`unisono demo`: pictures of the primitives, a race with gloo, and a report of both."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from unisono.errors import UnisonoError
from unisono.launcher.command import check_writable
from unisono.output_files import write_text
from unisono.show.table import build_table, to_markdown
from unisono.torch_support import require_torch

if TYPE_CHECKING:
    from rich.text import Text

RACE_S = 10.0
RACE_HEADS = (">unisono us", ">gloo us", ">times faster")
RACE_BYTES = [8, 1024, 64 * 1024, 1 << 20, 16 << 20]


@click.command()
@click.option("-n", "--ranks", default=4, show_default=True, type=click.IntRange(2, 8))
@click.option("--race/--no-race", default=True, show_default=True, help="Race gloo (needs torch).")
@click.option(
    "--report",
    default="demo-report.md",
    show_default=True,
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Where to write the report.",
)
def demo(ranks: int, race: bool, report: Path) -> None:
    """Show what every primitive does, then race gloo.

    Starts RANKS processes on this machine, runs the primitives on small numbers and draws what each
    rank had, what moved and what each rank has now, including a deadlock and a mismatch; then
    measures all_reduce on two ranks, taking turns with gloo.
    """
    check_writable(report)
    if race:
        require_torch("the race with gloo (--no-race skips it)")
    start = time.perf_counter()
    console = Console()
    pictures = _show_pictures(ranks, console)
    laps = _show_race(console) if race else []
    write_text(report, _report(pictures, laps, ranks))
    console.print(f"wrote {report} ({time.perf_counter() - start:.0f} s in all)")


def _show_pictures(ranks: int, console: Console) -> list[Text]:
    from unisono.demo import scenes
    from unisono.demo.drawing import PLAIN, draw_all
    from unisono.launcher.functions import launch

    console.print(f"[bold]unisono[/]: {ranks} processes of this machine over shared memory\n")
    outcomes = launch(scenes.run_all_scenes, ranks, threads=1)
    scenes.check(outcomes)
    lines = list(draw_all(outcomes))
    has_unicode = console.encoding.lower().startswith("utf")
    for line in lines:
        console.print(line if has_unicode else line.plain.translate(PLAIN), highlight=False)
    console.print("Every number was compared with plain arithmetic: all are right.\n")
    return lines


def _show_race(console: Console) -> list[tuple[str, ...]]:
    console.print(f"all_reduce of float32 on 2 ranks, in turns with gloo ({RACE_S:g} s) ...")
    laps = _race()
    console.print(build_table((">all_reduce of", *RACE_HEADS), laps))
    return laps


def _race() -> list[tuple[str, ...]]:
    """The median time of one all_reduce for each of the two, one row per size."""
    from unisono.bench import measure_run
    from unisono.bench.text import size_text

    budget_s = RACE_S / len(RACE_BYTES)
    race: Any = {"ranks": 2, "sizes": RACE_BYTES, "backends": "unisono,gloo", "floor": False}
    run = measure_run("all_reduce", budget_s=budget_s, **race)
    if run.skipped:
        raise UnisonoError(str(run.skipped[0]))
    if run.wrong:
        raise UnisonoError(f"all_reduce: {run.wrong} elements differ from the exact result")
    us = {(row.backend, row.size_bytes): row.time_us.p50 for row in run.rows}
    laps: list[tuple[str, ...]] = []
    for size in RACE_BYTES:
        ours, theirs = us["unisono", size], us["gloo", size]
        laps.append((size_text(size), f"{ours:.1f}", f"{theirs:.1f}", f"{theirs / ours:.1f}"))
    return laps


def _report(pictures: Sequence[Text], laps: Sequence[tuple[str, ...]], ranks: int) -> str:
    facts = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    lines = ["# unisono on this machine", "", f"{facts}. Written by `unisono demo`."]
    shown = [line.plain.rstrip() for line in pictures]
    lines += ["", f"## The primitives on {ranks} ranks", "", "```", *shown, "```"]
    if laps:
        lines += ["", "## all_reduce of float32 on 2 ranks, median of one call", ""]
        lines += to_markdown((">bytes", *RACE_HEADS), laps).splitlines()
    return "\n".join(lines) + "\n"
