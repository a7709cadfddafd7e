"""`unisono top`."""

from __future__ import annotations

import click
from rich.console import Console


@click.command()
@click.option("--once", is_flag=True, help="Show the jobs once and end.")
@click.option("--json", "wants_json", is_flag=True, help="The same as JSON, for scripts.")
@click.argument("pid", type=int, required=False)
def top(once: bool, wants_json: bool, pid: int | None) -> None:
    """Show the running jobs of this user on this machine, rank by rank.

    Finds every process that is in a group of unisono, or in one of another backend that is
    watched (unisono.watch); the jobs need not be prepared. A rank that is stuck is red, and one
    for which the others wait has a `!`; above the ranks stands what the watch says of it (where
    the rank is, if the job is watched). In a narrow terminal columns are left out.

    `s` shows stacks (of jobs that are watched), arrows, PgUp, PgDn, Home and End scroll, `q`
    and Ctrl-C quit. With PID, only the job of which that process is a rank or the launcher.
    """
    from unisono.watch.top_screen import run

    run(once, wants_json, pid, Console())
