"""`unisono demo`."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from unisono.errors import UnisonoError


@click.command()
@click.option("-n", "--ranks", default=4, show_default=True, type=click.IntRange(2, 8))
@click.option(
    "--only",
    type=click.Choice(["pictures", "race"]),
    help="One half of it: the primitives as pictures, or the race with gloo.",
)
@click.option(
    "--report",
    default="demo-report.md",
    show_default=True,
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Where to write what was shown.",
)
def demo(ranks: int, only: str | None, report: Path) -> None:
    """Show what every primitive does, then race gloo.

    Starts RANKS processes on this machine, runs the primitives on small numbers and draws what
    each rank had, what moved and what each rank has, a deadlock and a mismatch included; then
    measures all_reduce on two ranks, in turns with gloo.
    """
    from unisono.demo.tour import run_demo

    if not report.resolve().parent.is_dir():
        raise click.BadParameter(f"the folder of {report} does not exist", param_hint="--report")
    try:
        run_demo(ranks, report, Console(), pictures=only != "race", racing=only != "pictures")
    except UnisonoError as error:
        raise click.ClickException(str(error)) from error
