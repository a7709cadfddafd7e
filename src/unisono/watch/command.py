"""`unisono top`: the running jobs as tables, once or until Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from unisono.errors import Misuse
from unisono.plan.sizes import format_bytes
from unisono.processes import command_of, state_of
from unisono.show.table import Column, build_table, to_json
from unisono.watch.top import Job, RankRow, Verdicts, jobs
from unisono.watch.whereabouts import whereabouts

_PERIOD_S = 1.0
_MOST_FRAMES = 12


@click.command()
@click.option("--once", is_flag=True, help="Show the jobs once and exit.")
@click.option("--stacks", is_flag=True, help="Also show where the ranks are, if they are watched.")
@click.option("--json", "wants_json", is_flag=True, help="The same as JSON, for scripts.")
@click.argument("pid", type=int, required=False)
def top(once: bool, stacks: bool, wants_json: bool, pid: int | None) -> None:
    """Show the running jobs of this user on this machine, rank by rank.

    Goes on until Ctrl-C. Finds every process that is in a group of unisono, or in a watched group
    of another backend (unisono.watch); the jobs need no preparation. A stuck rank is red, and a
    rank for which the others wait has a `!`; the watch's verdict is above the ranks (with the
    rank's line, if the job is watched). A narrow terminal shows fewer columns; `unisono top --once
    | less` shows all ranks of a large job.

    With PID, only the job of which that process is a rank or the launcher.
    """
    console, verdicts = Console(), Verdicts()
    found = jobs(pid, verdicts)
    if pid is not None and not found:
        raise Misuse(_why_not(pid))
    if wants_json:
        click.echo(to_json(found, 1))
    elif once or not console.is_terminal:
        console.print(render(found, console.width, stacks))
    else:
        with (
            contextlib.suppress(KeyboardInterrupt),
            Live(console=console, screen=True, auto_refresh=False) as live,
        ):
            while True:
                live.update(render(found, console.width, stacks), refresh=True)
                time.sleep(_PERIOD_S)
                found = jobs(pid, verdicts)


def _why_not(pid: int) -> str:
    """Why there is no job to show for a process."""
    if state_of(pid).has_ended:
        return f"there is no process {pid}"
    if os.stat(f"/proc/{pid}").st_uid != os.geteuid():
        return f"process {pid} ({command_of(pid)}) is another user's"
    return (
        f"process {pid} ({command_of(pid)}) is neither a rank nor a launcher of ranks: it is not "
        "in a group of unisono or in a watched group of another backend. `unisono top` shows "
        "every job"
    )


COLUMNS = (
    Column("group", lambda row: _group(row), 60),
    Column("<rank", lambda row: str(row.rank)),
    Column("host", lambda row: row.host, 60),
    Column("<pid", lambda row: str(row.pid), 70),
    Column("in", lambda row: _doing(row)),
    Column(">for", lambda row: f"{row.call_s:.1f} s" if row.call else ""),
    Column("at", lambda row: row.site),
    Column(">calls", lambda row: f"{row.calls:,}", 150),
    Column(">calls/s", lambda row: f"{row.calls_a_second:,.0f}", 110),
    Column(">bytes/s", lambda row: format_bytes(round(row.bytes_a_second)), 120),
    Column(">wait", lambda row: f"{row.wait_share:.0%}", 80),
    Column(">lag", lambda row: f"{row.lag_s * 1e3:.1f} ms", 130),
)


def render(jobs: Sequence[Job], width: int, wants_stacks: bool = False) -> Group:
    """The jobs, for a terminal of this many columns."""
    if not jobs:
        return Group(Text("no job of this user runs on this machine"))
    parts: list[RenderableType] = []
    for job in jobs:
        parts.append(Text(f"{job.command}  ({len(job.pids)} processes)"))
        if len({row.group for row in job.rows}) == 1:
            parts.append(Text(f"group {_group(job.rows[0])}", style="dim"))
        if job.verdict:
            parts.append(Text(job.verdict, style="bold red"))
        parts.append(_table(job, width))
        for pid in job.pids if wants_stacks else ():
            parts.append(Text(f"pid {pid}", style="bold"))
            parts += [Text(f"  {line}") for line in whereabouts(pid).stack[:_MOST_FRAMES]]
    return Group(*parts)


def _table(job: Job, width: int) -> Table:
    needless = {"group"} if len({row.group for row in job.rows}) == 1 else set()
    if not any(row.host for row in job.rows):
        needless.add("host")
    columns = [
        column
        for column in COLUMNS
        if column.least_width <= width and column.heading not in needless
    ]
    if any(row.is_culprit for row in job.rows):
        # A mark before its rank, for eyes and terminals without red.
        columns.insert(0, Column("<", lambda row: "!" if row.is_culprit else ""))
    rows = [[column.show(row) for column in columns] for row in job.rows]
    styles = ["bold red" if row.is_culprit else "red" * row.is_stuck for row in job.rows]
    return build_table([column.heading for column in columns], rows, styles)


def _group(row: RankRow) -> str:
    return row.group if row.backend == "unisono" else f"{row.group} ({row.backend})"


def _doing(row: RankRow) -> str:
    state = "" if row.state in ("is running", "is asleep") else row.state
    return row.call or state or "its program"
