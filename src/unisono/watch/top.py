"""`unisono top`: the running jobs of this user on this machine, rank by rank."""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from unisono.comm.shared_memory.records import GroupRecords, Record, segments_of
from unisono.errors import UnisonoError
from unisono.processes import command_of, parent_of, state_of
from unisono.watch.calls import IN_FLIGHT, by_number, call_name, line_of, snapshot
from unisono.watch.whereabouts import whereabouts

STUCK_S = 5.0
"""A rank that has been in one call, or out of any while others wait, for so long is shown red."""

_WINDOW_S = 2.0
_PERIOD_S = 1.0


@dataclass(frozen=True)
class RankRow:
    """One rank in one group. `host` is the name of its host, in a group over several. `call_s` is
    for how long it has been in `call`; rates, shares and lag are means over its last two seconds of
    records."""

    group: str
    backend: str
    rank: int
    global_rank: int
    pid: int
    state: str
    call: str
    call_s: float
    site: str
    calls: int
    calls_a_second: float
    bytes_a_second: float
    wait_share: float
    lag_s: float
    is_stuck: bool
    host: str = ""


@dataclass(frozen=True)
class Job:
    """Processes that share groups."""

    command: str
    pids: tuple[int, ...]
    rows: tuple[RankRow, ...]


def jobs(of: int | None = None) -> list[Job]:
    """The running jobs of this user, each with all ranks of all its groups; `of`: only the one of
    this process, or of which it is the launcher."""
    found: list[Job] = []
    for pids, groups in _connected(snapshot(_ranks_of_this_user())):
        if of is not None and of not in pids | {parent_of(pid) for pid in pids}:
            continue
        rows = [row for group in groups for row in _rows(group)]
        ordered = sorted(rows, key=lambda row: (row.group, row.rank))
        found.append(Job(command_of(min(pids)), tuple(sorted(pids)), tuple(ordered)))
    return found


def _connected(groups: list[GroupRecords]) -> list[tuple[set[int], list[GroupRecords]]]:
    """The groups by job, with the processes of each. Two groups are of one job also where the
    process that connects them has left one, which its peers still show."""
    found: list[tuple[set[int], list[GroupRecords]]] = []
    for group in groups:
        pids, several = {member.pid for member in group.ranks}, [group]
        for job in [job for job in found if job[0] & pids]:
            found.remove(job)
            pids |= job[0]
            several += job[1]
        if pids:
            found.append((pids, several))
    return found


def _ranks_of_this_user() -> list[int]:
    """The processes of this user that are in a group, native or watched."""
    me = os.geteuid()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            if os.stat(f"/proc/{name}").st_uid == me and segments_of(int(name)):
                found.append(int(name))
        except (OSError, UnisonoError):
            continue
    return sorted(found)


def _rows(group: GroupRecords) -> list[RankRow]:
    now = time.monotonic()
    first: dict[int, float] = {
        number: min(record.arrived_s for record in records.values())
        for number, records in by_number(group).items()
    }
    furthest = max(
        (member.records[-1].call or 0 for member in group.ranks if member.records), default=0
    )
    rows = []
    for member in group.ranks:
        flying = [record for record in member.records if record.state in IN_FLIGHT]
        recent = [record for record in member.records if now - record.arrived_s < _WINDOW_S]
        span_s = (
            max(1e-3, min(_WINDOW_S, now - member.records[0].arrived_s)) if member.records else 1.0
        )
        waited_s = sum(_waited_s(record, now) for record in member.records)
        lags = [record.arrived_s - first[record.call] for record in recent if record.call]
        state = state_of(member.pid)
        own = max((record.call or 0 for record in member.records), default=0)
        call_s = now - flying[0].arrived_s if flying else 0.0
        behind = own < furthest and bool(member.records) and not flying
        quiet_s = now - (member.records[-1].ended_s or now) if member.records else 0.0
        rows.append(
            RankRow(
                group=group.name,
                backend=group.backend,
                rank=member.rank,
                global_rank=member.global_rank,
                pid=member.pid,
                state=str(state),
                call=call_name(flying[0]) if flying else "",
                call_s=call_s,
                site=line_of(flying[0].site) if flying else "",
                calls=own,
                calls_a_second=len(recent) / span_s,
                bytes_a_second=sum(record.bytes for record in recent) / span_s,
                wait_share=min(1.0, waited_s / span_s),
                lag_s=sum(lags) / len(lags) if lags else 0.0,
                is_stuck=call_s > STUCK_S
                or (behind and quiet_s > STUCK_S)
                or state.has_ended
                or state.is_stopped,
                host=member.host,
            )
        )
    return rows


def _waited_s(record: Record, now: float) -> float:
    """For how long of the window a call waited for its peers; a watched one does not say when they
    came, and counts as a whole."""
    until = record.started_s or record.ended_s or now
    return max(0.0, until - max(record.arrived_s, now - _WINDOW_S))


def as_json(found: Sequence[Job]) -> str:
    """The jobs for scripts."""
    return json.dumps([asdict(job) for job in found], indent=1)


def render(found: Sequence[Job], stacks: dict[int, tuple[str, ...]]) -> RenderableType:
    """The jobs for people."""
    if not found:
        return Text("no job of this user runs on this machine")
    parts: list[RenderableType] = []
    for job in found:
        table = Table(title=f"{job.command}  ({len(job.pids)} processes)", title_justify="left")
        for name in ("group", "rank", "pid", "in", "for", "at"):
            table.add_column(name, no_wrap=True)
        for name in ("calls", "calls/s", "bytes/s", "wait", "lag"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in job.rows:
            table.add_row(*_cells(row), style="red" if row.is_stuck else None)
        parts.append(table)
        for row in job.rows:
            if row.pid in stacks:
                parts.append(Text(f"rank {row.global_rank} (pid {row.pid})", style="bold"))
                parts += [Text(f"  {line}") for line in stacks[row.pid][:12]]
    parts.append(Text("s stacks   q quit", style="dim"))
    return Group(*parts)


def _cells(row: RankRow) -> list[str]:
    doing = row.call or ("" if row.state in ("is running", "is asleep") else row.state)
    return [
        row.group if row.backend == "unisono" else f"{row.group} ({row.backend})",
        f"{row.rank} on {row.host}" if row.host else str(row.rank),
        str(row.pid),
        doing or "its program",
        f"{row.call_s:.1f} s" if row.call else "",
        row.site,
        f"{row.calls:,}",
        f"{row.calls_a_second:,.0f}",
        _size(row.bytes_a_second),
        f"{row.wait_share:.0%}",
        f"{row.lag_s * 1e3:.1f} ms",
    ]


def _size(count: float) -> str:
    for unit in ("", "k", "M", "G"):
        if count < 1000:
            return f"{count:.0f} {unit}B" if unit else f"{count:.0f} B"
        count /= 1000
    return f"{count:.1f} TB"


def run(once: bool, wants_json: bool, of: int | None, console: Console) -> None:
    """Show the jobs, or the one of a process: once, or until `q`."""
    if wants_json:
        sys.stdout.write(as_json(jobs(of)) + "\n")
        return
    if once or not console.is_terminal:
        console.print(render(jobs(of), {}))
        return
    stacks: dict[int, tuple[str, ...]] = {}
    with _single_keys(), Live(render(jobs(of), stacks), console=console, screen=True) as live:
        while True:
            key = _key(_PERIOD_S)
            if key in ("q", "\x03"):
                return
            found = jobs(of)
            if key == "s":
                pids = [] if stacks else sorted({pid for job in found for pid in job.pids})
                stacks = {pid: whereabouts(pid).stack for pid in pids}
            live.update(render(found, stacks), refresh=True)


@contextlib.contextmanager
def _single_keys() -> Iterator[None]:
    """Keys come at once and are not shown."""
    if not os.isatty(0):
        yield
        return
    before = termios.tcgetattr(0)
    try:
        tty.setcbreak(0)
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


def _key(timeout_s: float) -> str:
    ready, _, _ = select.select([0], [], [], timeout_s)
    return os.read(0, 1).decode(errors="replace") if ready else ""
