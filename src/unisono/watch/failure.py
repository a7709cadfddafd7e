"""From a group's exception to its report."""

from __future__ import annotations

import re
import sys
from dataclasses import replace

from unisono.comm.shared_memory.records import GroupRecords, Process
from unisono.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    DeadlockError,
    GroupAborted,
    GroupError,
    MessageMismatch,
    PeerLost,
)
from unisono.watch.calls import CREATIONS, line_of, newest_calls
from unisono.watch.differences import mismatch
from unisono.watch.hangs import hang
from unisono.watch.job_view import JobView, look_at_job, may_ask, open_links
from unisono.watch.report import Report, add_history, describe_rank
from unisono.watch.stacks import describe_error
from unisono.watch.whereabouts import Ask, Whereabouts

_LAST = 256
_HOW = re.compile(r"\(pid \d+[^)]*\) ((?:was killed|exited) [^;\n]+)")
"""How a process ended, in the text of `PeerLost`."""


def report_of_error(error: GroupError, ask: Ask) -> Report | None:
    """What the exception says, and where every rank of its group is. None if the program ended the
    group by `abort`: who did it and why is known, and it need not be a fault. Also None on most
    ranks of a job over many hosts."""
    if isinstance(error, GroupAborted) or not may_ask():
        return None
    kind, culprits = _kind_of(error)
    view = look_at_job(ask, _LAST if open_links() else None)
    if kind != "failed":
        found = _from_records(error, view)
        if found is not None and _agrees(found, kind, culprits):
            if found.kind == kind == "mismatch" and isinstance(error, CollectiveMismatch):
                lines = tuple(line.strip() for line in str(error).splitlines()[1:-1])
                site = line_of(error.sites[found.culprits[0]])  # records may have no lines
                found = replace(found, details=lines, site=site)
            error.add_note(f"unisono.watch: {found}")
            return found
    verdict, *details = str(error).splitlines()
    groups = _groups_of(error, view)
    ranks = []
    operation, site = "", ""
    for member in groups[0].ranks if groups else ():
        here = member.process == view.me
        where = Whereabouts() if here or kind == "mismatch" else view.where(member.process)
        latest = member.records[-1] if member.records else None
        if here and latest is not None:
            operation = latest.operation
        if member.rank in culprits:
            site = line_of(where.location) or line_of(latest.site if latest else "")
        ranks.append(describe_rank(member, where, member.rank not in culprits))
    if isinstance(error, CollectiveMismatch) and culprits:
        site = line_of(error.sites[culprits[0]])
    found = Report(
        kind=kind,
        verdict=verdict,
        group=error.group,
        backend="unisono",
        operation=operation,
        call=error.call or None,
        culprits=culprits,
        site=site,
        details=tuple(line.strip() for line in details),
        ranks=tuple(ranks),
    )
    return add_history(found, groups)


def _from_records(error: GroupError, view: JobView) -> Report | None:
    """Who did not come, and why, if the records tell."""
    own_groups = _groups_of(error, view)
    different = mismatch(own_groups)
    if different is not None:
        return different
    own = newest_calls(own_groups, view.me)
    lost = error.peer if isinstance(error, PeerLost) else -1
    gone = {m.process for group in own_groups for m in group.ranks if m.rank == lost}
    how = _HOW.search(str(error))

    def where(process: Process) -> Whereabouts:
        """A process that has left may no longer be able to answer."""
        found = view.where(process)
        is_mute = process in gone and not found.state and not found.location
        if how and process in gone and found.state == "has ended":  # the launcher knew more
            return replace(found, state=how[1])
        return Whereabouts(state="left the group") if is_mute else found

    return hang(view.groups, own[0], where) if own else None


def _groups_of(error: GroupError, view: JobView) -> list[GroupRecords]:
    """The group, and others of the same name."""
    return [
        group
        for group in view.groups
        if group.name == error.group
        and group.backend != CREATIONS
        and any(member.process == view.me for member in group.ranks)
    ]


def _agrees(found: Report, kind: str, culprits: tuple[int, ...]) -> bool:
    """Whether the records say more than the exception and do not blame others: a rank that comes
    late to a failed call finds that all others have been there and left."""
    if kind == "cycle":
        return found.kind == kind and {*found.culprits} != {rank.rank for rank in found.ranks}
    if kind == "mismatch":
        return found.kind in ("apart", "threads") or (found.kind == kind and not culprits)
    if kind == "stalled" or (found.kind == "stalled" and culprits):
        return found.kind == kind and found.culprits == culprits
    return True


def _kind_of(error: GroupError) -> tuple[str, tuple[int, ...]]:
    if isinstance(error, CollectiveMismatch):
        return "mismatch", tuple(error.culprits)
    if isinstance(error, MessageMismatch):
        return "mismatch", ()
    if isinstance(error, CollectiveTimeout):
        kind = "stalled" if error.stalled else "hang"
        return kind, tuple(error.stalled or error.missing)
    if isinstance(error, DeadlockError):
        return "cycle", tuple(error.cycle)
    if isinstance(error, PeerLost):
        return "lost", (error.peer,)
    return "failed", ()


def describe_own_end() -> str:
    """How this process ends: completes "rank 3 ..."."""
    error = getattr(sys, "last_value", None)
    return describe_error(error) if isinstance(error, BaseException) else "has ended"
