"""The command `unisono`."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from unisono.errors import UnisonoError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="unisono")
def main() -> None:
    """Collective communication for PyTorch on one machine."""


@main.command()
@click.option("-n", "--ranks", default=4, show_default=True, type=click.IntRange(2, 16))
@click.option(
    "--report",
    default="demo-report.md",
    show_default=True,
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Where to write what was shown.",
)
def demo(ranks: int, report: Path) -> None:
    """Show every rank what a collective does, then race gloo.

    Starts RANKS processes on this machine, runs the collectives on small numbers and prints what
    each rank had and has; then measures all_reduce on two ranks, in turns with gloo.
    """
    from unisono.demo import run_demo

    if not report.resolve().parent.is_dir():
        raise click.BadParameter(f"the folder of {report} does not exist", param_hint="--report")
    try:
        run_demo(ranks, report, Console())
    except UnisonoError as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
