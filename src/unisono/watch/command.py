"""`unisono top`: the running jobs as tables, once or until Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from unisono.errors import Misuse
from unisono.plan.sizes import format_bytes
from unisono.processes import command_of, state_of
from unisono.watch.stack_server import whereabouts
from unisono.watch.top import Job, RankRow, Verdicts, jobs

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
        click.echo(json.dumps([asdict(job) for job in found], indent=1))
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


@dataclass(frozen=True)
class TopColumn:
    """A column, and how wide a terminal must be to show it. Numbers are never cut; words wrap to
    the next line."""

    name: str
    text: Callable[[RankRow], str]
    least_width: int = 0
    is_figure: bool = True


COLUMNS = (
    TopColumn("group", lambda row: _group(row), 60, is_figure=False),
    TopColumn("rank", lambda row: str(row.rank)),
    TopColumn("host", lambda row: row.host, 60, is_figure=False),
    TopColumn("pid", lambda row: str(row.pid), 70),
    TopColumn("in", lambda row: _doing(row), is_figure=False),
    TopColumn("for", lambda row: f"{row.call_s:.1f} s" if row.call else ""),
    TopColumn("at", lambda row: row.site, is_figure=False),
    TopColumn("calls", lambda row: f"{row.calls:,}", 150),
    TopColumn("calls/s", lambda row: f"{row.calls_a_second:,.0f}", 110),
    TopColumn("bytes/s", lambda row: format_bytes(round(row.bytes_a_second)), 120),
    TopColumn("wait", lambda row: f"{row.wait_share:.0%}", 80),
    TopColumn("lag", lambda row: f"{row.lag_s * 1e3:.1f} ms", 130),
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
    # A culprit has a mark before its rank, for eyes and terminals without red.
    has_culprit = any(row.is_culprit for row in job.rows)
    needless = {"group"} if len({row.group for row in job.rows}) == 1 else set()
    if not any(row.host for row in job.rows):
        needless.add("host")
    columns = [
        column for column in COLUMNS if column.least_width <= width and column.name not in needless
    ]
    table = Table()
    if has_culprit:
        table.add_column("", no_wrap=True)
    for column in columns:
        is_right = column.is_figure and column.name not in ("rank", "pid")
        table.add_column(
            column.name,
            justify="right" if is_right else "left",
            no_wrap=column.is_figure,
            overflow="fold",
        )
    for row in job.rows:
        mark = ["!" if row.is_culprit else ""] if has_culprit else []
        style = "bold red" if row.is_culprit else "red" if row.is_stuck else None
        table.add_row(*mark, *(column.text(row) for column in columns), style=style)
    return table


def _group(row: RankRow) -> str:
    return row.group if row.backend == "unisono" else f"{row.group} ({row.backend})"


def _doing(row: RankRow) -> str:
    state = "" if row.state in ("is running", "is asleep") else row.state
    return row.call or state or "its program"
