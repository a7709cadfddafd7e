"""Finds calls that differ between the ranks of a group, and ranks that are shifted or slow.

unisono's own groups compare calls themselves, before data moves; what only a sequence of calls
shows is found here for them, too.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from unisono.comm.on_rows.mismatches import PairwiseSizes
from unisono.comm.shared_memory.record_reader import read_process
from unisono.comm.shared_memory.records import GroupRecords
from unisono.comm.shared_memory.segment_listeners import tell_launcher
from unisono.watch import differences, steps
from unisono.watch.calls import with_creations
from unisono.watch.job_view import SPLITS, look_at_job, open_links, own_host
from unisono.watch.journal import DIFFERENT, SHIFTED, SLOW, Journal
from unisono.watch.report import Report
from unisono.watch.settings import WatchSettings
from unisono.watch.sight import Sight, watched_groups
from unisono.watch.slow import Slowness

LAST_OF_STEPS = 256
_SEEN = 3  # times, so that the place of a slow rank is known
_PATIENT_TIMES = 3
"""The report of a slow rank waits this many times longer until it is known where that is."""
_TOLD_S = 2.0
"""How long the ranks have to say how they split an all_to_all."""
_LOOK_S = 0.01


class Comparing:
    """What this process knows from comparing the ranks of its groups."""

    def __init__(self, settings: WatchSettings, sight: Sight, journal: Journal) -> None:
        self._hang_s, self._sight, self._journal = settings.hang_s, sight, journal
        self._compared: dict[tuple[int, int], GroupRecords] = {}
        self._steps: defaultdict[tuple[int, int], steps.Steps] = defaultdict(steps.Steps)
        self._slowness: defaultdict[tuple[int, int], Slowness] = defaultdict(Slowness)

    def look(self, groups: list[GroupRecords], at_the_end: bool = False) -> None:
        """Report what is new in these groups."""
        self._look_for_differences(groups)
        self._look_at_steps()
        self._look_for_slow_ranks(groups, at_the_end)

    def is_one_slow_elsewhere(self) -> bool:
        """Whether a rank of another host is slow."""
        return any(known.host not in ("", own_host()) for known in self._slowness.values())

    def _look_for_differences(self, groups: list[GroupRecords]) -> None:
        before, self._compared = self._compared, {group.segment: group for group in groups}
        for group in groups:
            is_known = before.get(group.segment) == group or not _may_differ(group)
            if is_known or (group.segment, DIFFERENT) in self._journal.told:
                continue
            if group.backend != "unisono" and differences.mismatch([group]) is not None:
                report = differences.mismatch([_with_all_records(group)])
                if report is not None:
                    self._tell_mismatch(group, report)
            elif (number := differences.unbalanced(group)) is not None:
                self._tell_mismatch(group, explain_splits(group, number))
            elif (group.segment, SHIFTED) not in self._journal.told:
                self._tell_shift(group, differences.shifted_by_lines(group))

    def _tell_mismatch(self, group: GroupRecords, report: Report) -> None:
        """Report that calls differ, once; the job may end because of it."""
        speaks = self._sight.is_lowest(group)
        if speaks:  # and asks all others where they are
            where = look_at_job(self._sight.where, 1).where
            report = differences.with_stacks(report, group, where)
        if self._journal.tell(report, speaks, (group.segment, DIFFERENT)):
            tell_launcher(report.to_text())

    def _look_at_steps(self) -> None:
        """Find ranks that made a different number of calls in a step; even unisono's own groups
        cannot see that by comparing calls."""
        if not steps.are_counted:
            return
        for group in self._sight.whole(read_process(os.getpid(), LAST_OF_STEPS)):
            if not self._journal.told & {(group.segment, SHIFTED), (group.segment, DIFFERENT)}:
                known = self._steps[group.segment]
                self._tell_shift(group, differences.shifted_in_step(group, known))

    def _tell_shift(self, group: GroupRecords, report: Report | None) -> None:
        """Report that a rank is shifted, once; the program may continue."""
        if report is not None:
            self._journal.tell(report, self._sight.is_lowest(group), (group.segment, SHIFTED))

    def _look_for_slow_ranks(self, groups: list[GroupRecords], at_the_end: bool) -> None:
        """Report that the others wait for one rank after a while, and again at the end if much has
        been added."""
        for group in groups:
            is_mine = group.ranks[0].pid == os.getpid() and group.ranks[0].host in ("", own_host())
            if len(group.ranks) < max(2, group.size) or not is_mine:
                continue
            known = self._slowness[group.segment]
            known.look(group, self._sight.where_now)
            is_known = known.places.total() >= _SEEN or at_the_end
            enough_s = 2 * known.told_s or (1 if is_known else _PATIENT_TIMES) * self._hang_s
            if known.seen_s < enough_s or (known.told_s and not at_the_end):
                continue
            report = known.report(group)
            if report is not None and self._journal.tell(report, key=(group.segment, SLOW)):
                known.told_s = known.seen_s


def explain_splits(group: GroupRecords, number: int) -> Report:
    """The report of an all_to_all whose parts do not fit, by how every rank split it: as far as
    they tell, after their own watches saw that, or were asked."""
    end = time.monotonic() + _TOLD_S
    told: dict[int, Any] = {}
    for links in open_links() if group.is_part else ():
        asked = [member.global_rank for member in group.ranks]
        for answer in links.ask_ranks(asked, SPLITS, [group.name, number], _TOLD_S).values():
            told |= {int(rank): sizes for rank, sizes in answer.items() if sizes}
    while time.monotonic() < end and len(told) < group.size:
        own = tell_splits((group.name, number))
        told |= {rank: sizes for rank, sizes in own.items() if sizes}
        if group.is_part:
            break
        time.sleep(_LOOK_S)
    unknown = [None] * group.size
    rows = [told.get(rank, (unknown, unknown)) for rank in range(group.size)]
    sizes = PairwiseSizes([row[0] for row in rows], [row[1] for row in rows])
    return differences.unequal_splits(group, number, sizes if sizes.unequal_pairs() else None)


def tell_splits(about: Sequence[Any]) -> dict[int, Any]:
    """How the ranks of this host split a call of a group: its name, and the call's number."""
    watched = next((each for each in watched_groups if each.ledger.name == about[0]), None)
    return {} if watched is None else dict(watched.tell_splits(about[1]))


def _with_all_records(group: GroupRecords) -> GroupRecords:
    """A group with all its recorded calls: the cause of a difference may be far back."""
    if group.is_part:
        return group
    known = with_creations(read_process(os.getpid()))
    return next((found for found in known if found.segment == group.segment), group)


def _may_differ(group: GroupRecords) -> bool:
    """Whether any call was not the same on all ranks, on the same line: else nothing else can
    differ."""
    calls: dict[int | None, tuple[object, ...]] = {}
    for member in group.ranks:
        for made in member.records:
            what = made.operation, made.dtype, made.bytes, made.reduction, made.root, made.site
            if made.call and (calls.setdefault(made.call, what) != what or made.balance):
                return True
    return False
