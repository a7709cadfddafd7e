"""Ranks that do not come when a group is made.

A group that is being made has no records yet. unisono's own calls say what they make and whom they
wait for (makings.py). In others the stacks tell: this process has been in a call that makes a group
for too long, and another rank is not in it. Who the other ranks are is known from the launcher's
variables for the world, and from the records of the world for other groups.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from unisono.comm.meeting import makings
from unisono.comm.shared_memory.records import GroupRecords, Process, RankRecords
from unisono.errors import name_number, name_ranks, plural
from unisono.processes import children_of, parent_of
from unisono.watch.calls import line_of
from unisono.watch.job_view import own_host
from unisono.watch.report import RankReport, Report, describe_rank
from unisono.watch.stacks import calling_line
from unisono.watch.whereabouts import Ask, Whereabouts

_FILES = (
    os.path.join("torch", "distributed", "distributed_c10d.py"),
    os.path.join("unisono", "world", "world.py"),
)
_OF_WORLD = ("init_process_group", "init")
_OF_MEMBERS = ("new_group", "split_group")
_LAUNCHED = ("WORLD_SIZE", "MASTER_PORT", "UNISONO_RENDEZVOUS")
"""Variables that are equal for the ranks of one launch."""


@dataclass(frozen=True)
class OverdueMaking:
    """A call of this process that makes a group: the function, the line of the program, since when;
    `members` are global ranks, none for all; None in the call that makes the world. A call of ours
    says itself what it makes (`own`): then `members` are ranks of its parent."""

    function: str
    line: str
    since_s: float
    members: tuple[int, ...] | None
    own: makings.Making | None = None

    def processes(self, groups: Iterable[GroupRecords]) -> dict[int, Process]:
        """The processes that it needs, as far as they are known, by rank."""
        if self.own is not None:
            parent, here = self.own.parent, own_host()
            if parent is None or parent.rank not in self.own.notes():
                return {}  # the note is too long
            peers = {rank: parent.membership.members[rank] for rank in self.own.living_members()}
            return {
                rank: (here if peer.is_here else peer.host, peer.pid)
                for rank, peer in peers.items()
            }
        if self.members is None:
            return {rank: (own_host(), pid) for rank, pid in _launched_together().items()}
        known = {member.global_rank: member.process for group in groups for member in group.ranks}
        return {rank: known[rank] for rank in self.members or known if rank in known}

    def report(self, processes: Mapping[int, Process], ask: Ask) -> Report | None:
        """Who has not come; None if all have."""
        name = self.function.partition("(")[0] if self.own else self.function
        group = "world" if self.members is None else f"of {name_ranks(self.members)}"
        ranks = [self._describe(rank, of, ask(of)) for rank, of in sorted(processes.items())]
        absent = [rank for rank in ranks if not rank.arrived]
        reached = f"reached {self.function} ({self.line})"
        size = int(os.environ.get("WORLD_SIZE") or 0)
        who: list[int] = []
        if self.own is not None and self.own.parent is None:
            kind, group = "elsewhere", "?"
            verdict = f"{self.function} ({self.line}) waits for processes that have not joined"
            me = own_host(), os.getpid()
            ranks = [describe_rank(RankRecords(0, 0, me[1], ()), ask(me), True)]
        elif absent:
            first = absent[0]
            who = [rank.rank for rank in absent if rank.where() == first.where()]
            on = f" on {first.host}" if first.host and len(who) == 1 else ""
            it = f"it {first.where()}" if len(who) == 1 else f"they {plural(first.where())}"
            kind, verdict = "hang", f"{name_ranks(who)}{on} never {reached}: {it}"
        elif self.members is None and 0 < len(ranks) < size:
            kind, others = "elsewhere", name_number(size - len(ranks), "rank")
            verdict = (
                f"{name_ranks(list(processes))} {reached}: of {others} that another launcher or "
                "machine started, some have not, or cannot be reached"
            )
            if _are_all_siblings(size):
                kind, who = "lost", [rank for rank in range(size) if rank not in processes]
                have = "it has" if len(who) == 1 else "they have"
                verdict = f"{name_ranks(who)} never {reached}: {have} ended"
        else:
            return None
        return Report(
            kind=kind,
            verdict=verdict,
            group=group,
            backend="unisono" if self.own else "torch",
            operation=name,
            call=None,
            culprits=tuple(who),
            site=line_of(absent[0].place) if absent else self.line,
            waited_s=time.monotonic() - self.since_s,
            ranks=tuple(ranks),
        )

    def _describe(self, rank: int, process: Process, where: Whereabouts) -> RankReport:
        member = RankRecords(rank, rank, process[1], records=(), host=process[0])
        if self.own is None:
            has_come = any(line.endswith(f" in {self.function}") for line in where.stack)
            return describe_rank(member, where, has_come)
        says = self.own.notes().get(rank)
        call = says.what.rpartition(" at ")[0] if says else ""
        return describe_rank(member, where, says is not None and self.own.key in says.keys, call)


class Makings:
    """The calls of this process that make a group and have not returned."""

    def __init__(self) -> None:
        self._since: dict[tuple[int, int], float] = {}
        self._again_s: dict[tuple[int, int], float] = {}
        self._told: set[tuple[float, str, tuple[int, ...]]] = set()

    def overdue(self, limit_s: float) -> list[OverdueMaking]:
        """Those that have taken this long; again after as long."""
        now = time.monotonic()
        found = self._look()
        self._again_s = {key: self._again_s.get(key, now + limit_s) for key in found}
        late = [key for key, again_s in self._again_s.items() if now > again_s]
        self._again_s |= dict.fromkeys(late, now + limit_s)
        return [_making(key[0], found[key], self._since[key]) for key in late]

    def is_news(self, making: OverdueMaking, report: Report) -> bool:
        """Whether that was not told of these ranks before (one that was late may have ended since),
        and the call has still not returned: asking all ranks takes time."""
        self._look()
        told = making.since_s, report.kind, report.culprits
        is_new = told not in self._told
        self._told.add(told)
        return is_new and making.since_s in self._since.values()

    def _look(self) -> dict[tuple[int, int], FrameType | makings.Making]:
        now, found = time.monotonic(), {}
        for thread, top in sys._current_frames().items():
            at, own = _maker(top), makings.in_progress.get(thread)
            is_recorded = at is None and own is not None and own.what.startswith("new_group(")
            call = None if is_recorded else own or at
            if call is not None:
                found[thread, id(call)] = call
        self._since = {key: self._since.get(key, now) for key in found}
        return found


def _maker(frame: FrameType | None) -> FrameType | None:
    """The call on this stack that makes a group, if records do not show it."""
    while frame is not None:
        name = frame.f_code.co_name
        if name in (*_OF_WORLD, *_OF_MEMBERS) and frame.f_code.co_filename.endswith(_FILES):
            is_recorded = name == "new_group" and not frame.f_locals["use_local_synchronization"]
            return None if is_recorded else frame
        frame = frame.f_back
    return None


def _making(thread: int, call: FrameType | makings.Making, since_s: float) -> OverdueMaking:
    if isinstance(call, makings.Making):
        line = calling_line(sys._current_frames().get(thread)) or "?"
        return OverdueMaking(call.what, line, since_s, tuple(call.living_members()), call)
    frame = call
    name, line = frame.f_code.co_name, calling_line(frame) or "?"
    if name in _OF_WORLD:
        return OverdueMaking(name, line, since_s, None)
    ranks = frame.f_locals.get("ranks") or frame.f_locals.get("my_group") or ()
    return OverdueMaking(name, line, since_s, tuple(ranks))


def _launched_together() -> dict[int, int]:
    """The ranks of this host that were started with this process, by torchrun or another launcher
    that gives each its variables: their pids."""
    me = os.getpid()
    mine = _variables_of(me)
    found: dict[int, int] = {}
    if mine.get("RANK") != os.environ.get("RANK"):
        return {}  # the program, not the launcher, has made the ranks
    for pid in (me, *children_of(parent_of(me))):
        own = _variables_of(pid)
        alike = all(own.get(name) == mine.get(name) for name in _LAUNCHED)
        if alike and own.get("RANK", "").isdigit():
            found.setdefault(int(own["RANK"]), pid)  # `tee` in a pipeline has a rank's variables
    return found


def _are_all_siblings(size: int) -> bool:
    """Whether the parent of this process has started all ranks, and is not a shell for this one."""
    is_whole = os.environ.get("LOCAL_WORLD_SIZE") == str(size)
    return is_whole and "RANK" not in _variables_of(parent_of(os.getpid()))


def _variables_of(pid: int) -> dict[str, str]:
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)
