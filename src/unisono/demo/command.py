"""`unisono demo`: pictures of the primitives, and a race with gloo."""

from __future__ import annotations

from typing import Any

import click
from rich.console import Console

from unisono.errors import UnisonoError
from unisono.torch_support import require_torch

RACE_S = 10.0
RACE_BYTES = [8, 1024, 64 * 1024, 1 << 20, 16 << 20]


@click.command()
@click.option("-n", "--ranks", default=4, show_default=True, type=click.IntRange(2, 8))
@click.option("--race/--no-race", default=True, show_default=True, help="Race gloo (needs torch).")
def demo(ranks: int, race: bool) -> None:
    """Show what every primitive does, then race gloo.

    Starts RANKS processes on this machine, runs the primitives on small numbers and draws what each
    rank had, what moved and what each rank has now, including a deadlock and a mismatch; then
    measures all_reduce on two ranks, taking turns with gloo.
    """
    if race:
        require_torch("the race with gloo (--no-race skips it)")
    console = Console()
    _show_pictures(ranks, console)
    if race:
        _show_race(console)


def _show_pictures(ranks: int, console: Console) -> None:
    from unisono.demo import scenes
    from unisono.demo.drawing import PLAIN, draw_all
    from unisono.launcher.functions import launch

    console.print(f"[bold]unisono[/]: {ranks} processes of this machine over shared memory\n")
    outcomes = launch(scenes.run_all_scenes, ranks, threads=1)
    scenes.check(outcomes)
    has_unicode = console.encoding.lower().startswith("utf")
    for line in draw_all(outcomes):
        console.print(line if has_unicode else line.plain.translate(PLAIN), highlight=False)
    console.print("Every number was compared with plain arithmetic: all are right.\n")


def _show_race(console: Console) -> None:
    """The median time of one all_reduce for each of the two, one row per size."""
    from rich.table import Table

    from unisono.bench import measure_run
    from unisono.bench.text import size_text

    console.print(f"all_reduce of float32 on 2 ranks, in turns with gloo ({RACE_S:g} s) ...")
    budget_s = RACE_S / len(RACE_BYTES)
    race: Any = {"ranks": 2, "sizes": RACE_BYTES, "backends": "unisono,gloo", "floor": False}
    run = measure_run("all_reduce", budget_s=budget_s, **race)
    if run.skipped:
        raise UnisonoError(str(run.skipped[0]))
    if run.wrong:
        raise UnisonoError(f"all_reduce: {run.wrong} elements differ from the exact result")
    us = {(row.backend, row.size_bytes): row.time_us.p50 for row in run.rows}
    table = Table()
    for head in ("all_reduce of", "unisono us", "gloo us", "times faster"):
        table.add_column(head, justify="right")
    for size in RACE_BYTES:
        ours, theirs = us["unisono", size], us["gloo", size]
        table.add_row(size_text(size), f"{ours:.1f}", f"{theirs:.1f}", f"{theirs / ours:.1f}")
    console.print(table)
