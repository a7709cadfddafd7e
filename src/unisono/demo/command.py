"""`unisono demo`: pictures of the primitives, and a race with gloo."""

from __future__ import annotations

import click
from rich.console import Console
from rich.table import Table

from unisono.torch_support import require_torch

RACE_S = 10.0
_SIZES_BYTES = [8, 1024, 64 * 1024, 1 << 20, 16 << 20]


@click.command()
@click.option("-n", "--ranks", default=4, show_default=True, type=click.IntRange(2, 8))
@click.option("--race/--no-race", default=True, show_default=True, help="Race gloo (needs torch).")
def demo(ranks: int, race: bool) -> None:
    """Show what every primitive does, then race gloo.

    Starts RANKS processes on this machine, runs the primitives on small numbers and draws what
    each rank had, what moved and what each rank has, a deadlock and a mismatch included; then
    measures all_reduce on two ranks, in turns with gloo.
    """
    if race:
        require_torch("the race with gloo (--no-race leaves it out)")
    console = Console()
    _show_pictures(ranks, console)
    if race:
        console.print(f"all_reduce of float32 on 2 ranks, in turns with gloo ({RACE_S:g} s) ...")
        console.print(_race(RACE_S))


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


def _race(budget_s: float) -> Table:
    """The median time of one all_reduce by each of the two, as a row for each size, measured on two
    new ranks for about `budget_s` seconds in all.

    Raises UnisonoError if the ranks fail, a result is wrong, or there is no gloo.
    """
    from unisono.bench import measure_run
    from unisono.bench.text import size_text
    from unisono.errors import UnisonoError

    run = measure_run(
        "all_reduce",
        ranks=2,
        sizes=_SIZES_BYTES,
        backends="unisono,gloo",
        budget_s=budget_s / len(_SIZES_BYTES),
        floor=False,
    )
    if run.skipped:
        raise UnisonoError(str(run.skipped[0]))
    if run.wrong:
        raise UnisonoError(f"all_reduce: {run.wrong} elements differ from the exact result")
    us = {(row.backend, row.size_bytes): row.time_us.p50 for row in run.rows}
    table = Table()
    for head in ("all_reduce of", "unisono us", "gloo us", "times faster"):
        table.add_column(head, justify="right")
    for size in _SIZES_BYTES:
        ours, gloos = us["unisono", size], us["gloo", size]
        table.add_row(size_text(size), f"{ours:.1f}", f"{gloos:.1f}", f"{gloos / ours:.1f}")
    return table
