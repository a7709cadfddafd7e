"""The watching thread of a process: finds calls that wait too long, and answers questions."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from unisono.comm.engine import native
from unisono.comm.on_rows.mismatches import PairwiseSizes
from unisono.comm.shared_memory.record_reader import OwnRecords, read_process
from unisono.comm.shared_memory.records import GroupRecords, Process, RankRecords
from unisono.comm.shared_memory.segment_listeners import tell_launcher
from unisono.processes import state_of
from unisono.watch import diagnose, steps
from unisono.watch.absent import Makings
from unisono.watch.calls import (
    CREATIONS,
    IN_FLIGHT,
    Wait,
    calls_of,
    last_call_number,
    newest_calls,
    snapshot,
    waits,
    with_creations,
)
from unisono.watch.job_view import (
    EAGER_HOSTS,
    SPLITS,
    JobView,
    accept_farewell,
    host_number,
    look_at_job,
    open_links,
    own_groups,
    own_host,
    say_farewell,
)
from unisono.watch.report import Report
from unisono.watch.settings import WatchSettings
from unisono.watch.slow import Slowness
from unisono.watch.stack_server import StackServer, whereabouts
from unisono.watch.stacks import WATCHING
from unisono.watch.tracing import Tracing

_TICK_S = 0.1
_BUSY_TICK_S = 0.01
_GRACE_S = 1.5
_STANDS_STILL_S = 0.5  # time in which a running rank moves some data
_LEAVE_S = 5.0  # the thread may be waiting for silent processes; the program does not wait for it
_LAST = 64
"""How many records of each rank a diagnosis looks at."""
_LAST_OF_STEPS = 256
_SEEN = 3  # times, so that the place of a slow rank is known
_PATIENT_TIMES = 3
"""Hosts beyond the first eight wait this many times longer before they ask all others; so does the
report of a slow rank until it is known where that is."""
_TOLD_S = 2.0
"""How long the ranks have to say how they split an all_to_all."""
_LOOKS = 4  # in `hang_s`
_OVER_HOSTS_S = 5.0
"""How often the first rank looks at groups over hosts."""
_FAREWELL_S = 0.5
"""How long a rank that leaves waits for others, in all."""
_SHIFTED, _SLOW = -2, -3
"""In place of a call's number: a step, or all calls."""

_logger = logging.getLogger("unisono")

watched_groups: weakref.WeakSet[Any] = weakref.WeakSet()
"""The WatchedProcessGroups that attach.py has made, while something else holds them."""


class Monitor:
    """One per process. `reports` are those about calls of this rank, the newest last."""

    def __init__(self, settings: WatchSettings) -> None:
        self.settings = settings
        self.reports: list[Report] = []
        self.endings: dict[int, str] = {}
        self._explained: set[str] = set()
        self._stack_server = StackServer(settings.stack_signal)
        self._reported: set[tuple[tuple[int, int], int]] = set()
        self._awaited: dict[tuple[tuple[int, int], int], Wait] = {}
        self._saved = 0
        self._steps: dict[tuple[int, int], steps.Steps] = {}
        self._slowness: dict[tuple[int, int], Slowness] = {}
        self._slow_told_s: dict[tuple[int, int], float] = {}
        self.tracing = Tracing(self._retire)
        self._makings = Makings()
        self._stop = threading.Event()
        self._look_again_s = 0.0
        self._own_records = OwnRecords(_LAST_OF_STEPS)
        self._compared: dict[tuple[int, int], GroupRecords] = {}
        self._over_hosts: list[GroupRecords] = []
        self._where_over_hosts: diagnose.Ask | None = None
        self._over_hosts_again_s = 0.0
        self._farewell_s = _FAREWELL_S
        self._newest_at_farewell: set[tuple[tuple[int, int], int, str]] = set()
        self._thread = threading.Thread(target=self._run, name=WATCHING, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and the trace."""
        self.tracing.end()
        native.hold_aborts(False)
        self._stop.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_LEAVE_S)
        if not self._thread.is_alive():
            self._stack_server.close()
            self._own_records.close()

    def leave_to_parent(self) -> None:
        """In a forked child: drop what belongs to the parent."""
        self._stack_server.leave_to_parent()
        self._own_records.close()
        watched_groups.clear()

    def explain(self, group: Any) -> Report | None:
        """Why the newest call of a watched group failed."""
        end = time.monotonic() + _GRACE_S
        while True:
            self.endings |= group.ledger.endings()
            view = look_at_job(self.where, _LAST)
            own = [
                wait
                for wait in newest_calls(view.groups, view.me)
                if wait.group.name == group.ledger.name
                and wait.group.backend not in ("unisono", CREATIONS)
            ]
            number = diagnose.unbalanced(own[0].group) if own else None
            if number is not None:
                sizes = self._sizes_of(own[0].group, number)
                report: Report | None = diagnose.unequal_splits(own[0].group, number, sizes)
            else:
                report = diagnose.hang(view.groups, own[0], view.where) if own else None
            settled = report is not None and report.kind != "hang"
            if settled or time.monotonic() > end:
                self._explained.add(group.ledger.name)
                if report is not None:
                    self._keep(report, (own[0].group.segment, -1), "raised")
                return report
            time.sleep(0.05)  # the rank that failed first may still be exiting

    def look_for_differences(self) -> None:
        """Report calls of watched groups that differ, before the records go, and close finished
        records. Over hosts, one rank waits a moment for others that are behind, and all leave their
        records with the others."""
        self._retire()
        newest = {(*_key(call), call.record.state) for call in _own_newest_calls()}
        if newest <= self._newest_at_farewell:
            return  # torch destroys all groups one by one
        end = time.monotonic() + self._farewell_s
        while self._look_over_hosts(at_the_end=True) and time.monotonic() < end:
            time.sleep(_BUSY_TICK_S)
        groups = [*_whole(with_creations(read_process(os.getpid(), _LAST))), *self._over_hosts]
        self._look_for_differences(groups)
        self._look_at_steps()
        self._look_for_slow_ranks(groups, at_the_end=True)
        self._tell_what_went_on(groups)
        told = [key for key in self._reported if not key[0][0]]  # groups over hosts have no device
        say_farewell(_LAST, told, max(_TICK_S, end - time.monotonic()))
        self._farewell_s = max(0.0, end - time.monotonic())
        self._newest_at_farewell = newest

    def accept_farewell(self, told: dict[str, Any]) -> bool:
        """A rank of another host leaves a group, and has reported this much."""
        accept_farewell(told)
        self._reported |= {((*segment,), number) for segment, number in told["reported"]}
        return True

    def tell(self, report: Report, speaks: bool = True) -> None:
        """Keep a report made elsewhere; also log it if this rank `speaks`."""
        if self._keep(report, ((0, 0), len(self.reports))) and speaks:
            _logger.warning("unisono.watch: %s", report)

    def tell_failures(self, error: BaseException | None) -> None:
        """This process ends with `error`: log why, if it came from a watched group's call and has
        no report."""
        if not isinstance(error, RuntimeError) or hasattr(error, "report"):
            return
        for group in list(watched_groups):
            if group.ledger.name not in self._explained:
                report = self.explain(group)
                if report is not None:
                    _logger.warning("unisono.watch: %s", report)

    def _run(self) -> None:
        pause_s = _TICK_S
        while not self._stop.wait(pause_s):
            try:
                pause_s = self._tick()
            except Exception:  # the program goes on, and so do we
                _logger.debug("unisono.watch: a look at the records failed", exc_info=True)

    def _tick(self) -> float:
        """Do what is due; returns how long to sleep."""
        self._stack_server.answer_if_asked()
        if native.hold_aborts(None):
            self.look_for_differences()
            native.hold_aborts(False)
        busy = sum(group.retire() for group in list(watched_groups)) > 0
        busy |= self.tracing.collect()
        if time.monotonic() >= self._look_again_s:
            self._look_again_s = time.monotonic() + min(1.0, self.settings.hang_s / _LOOKS)
            self._retire()
            self._look()
        return _BUSY_TICK_S if busy else _TICK_S

    def _retire(self) -> None:
        """Record the ends of calls of watched groups, and how their processes ended."""
        for group in list(watched_groups):
            group.retire()
            self.endings |= group.ledger.endings()

    def _look(self) -> None:
        """Report what has waited for too long, and calls that differ, once."""
        me = os.getpid()
        now = time.monotonic()
        groups = own_groups(with_creations(read_process(me, _LAST)))
        self._look_over_hosts()
        self._look_for_differences([*_whole(groups), *self._over_hosts])
        self._look_at_steps()
        self._look_for_slow_ranks([*_whole(groups), *self._over_hosts])
        self._where_over_hosts = None
        for wait in waits(groups, me):
            key = _key(wait)
            late = now - wait.record.arrived_s > self.settings.hang_s
            if not late or key in self._reported or wait.is_for_anybody():
                continue
            if not self._asks_for_host(wait) or self._is_only_posted(wait, groups):
                continue
            view = look_at_job(
                self.where, _LAST_OF_STEPS, meanwhile=self._stack_server.answer_if_asked
            )
            still = [other for other in waits(view.groups, view.me) if _key(other) == key]
            report = diagnose.hang(view.groups, still[0], view.where) if still else None
            if report is not None and report.kind == "stalled" and _moves(still[0].group):
                continue
            if report is not None and self._holds_still(report, key):
                others = waits(groups, me) if report.kind == "cycle" else []
                is_told = any(_key(other) in self._awaited for other in others)
                is_new = self._keep(report, key) and not is_told
                if is_new and self._speaks(view, still[0], report):
                    _logger.warning("unisono.watch: %s", report)
                    self._awaited[key] = still[0]
                if diagnose.is_certain(report, view.where):
                    tell_launcher(report.to_text())
        self._tell_what_went_on(groups)
        self._look_for_absent_ranks()

    def _look_for_absent_ranks(self) -> None:
        """Report who does not come to a call that makes a group."""
        for making in self._makings.overdue(self.settings.hang_s):
            view = look_at_job(self.where, 1, meanwhile=self._stack_server.answer_if_asked)
            report = making.report(making.processes(view.groups), view.where)
            if report is None or not self._makings.is_news(making, report):
                continue
            self._keep(report, ((0, 0), len(self.reports)))
            if os.getpid() in [rank.pid for rank in report.ranks if rank.arrived][:1]:
                _logger.warning("unisono.watch: %s", report)
                if report.kind == "lost":  # it cannot come any more
                    tell_launcher(report.to_text())

    def _look_over_hosts(self, at_the_end: bool = False) -> bool:
        """In a job over few hosts, let the lowest rank, or one that is aborted, see whole groups
        over hosts; returns whether others have not reached its last calls yet."""
        links = open_links()
        is_due = at_the_end or time.monotonic() >= self._over_hosts_again_s
        are_few = bool(links) and links[0].hosts.count <= EAGER_HOSTS
        if not (is_due and are_few and (links[0].is_lowest() or native.hold_aborts(None))):
            return False
        slow = [known for known in self._slowness.values() if known.host not in ("", own_host())]
        pause_s = min(_OVER_HOSTS_S, self.settings.hang_s / _LOOKS)
        self._over_hosts_again_s = time.monotonic() + pause_s
        view = look_at_job(
            self._where_now,
            _LAST,
            wants_stacks=bool(slow) and not at_the_end,
            with_children=False,
            meanwhile=self._stack_server.answer_if_asked,
            hurry_s=max(_TICK_S, self._farewell_s) if at_the_end else 0.0,
        )
        self._over_hosts = [group for group in view.groups if group.is_part]
        self._where_over_hosts = view.where if slow else None
        return any(
            last_call_number(member) < max(map(last_call_number, own))
            for group in self._over_hosts
            if (own := [member for member in group.ranks if member.process == view.me])
            for member in group.ranks
            if links[0].may_answer(member.global_rank)
        )

    def _tell_what_went_on(self, groups: list[GroupRecords]) -> None:
        """Log that calls which were reported to hang have gone on."""
        for key, wait in list(self._awaited.items()):
            ended = calls_of(groups, os.getpid(), ("finished",))
            over = [call for call in ended if _key(call) == key]
            if over:
                del self._awaited[key]
                ended_s = over[0].record.ended_s or time.monotonic()
                waited_s = ended_s - wait.record.arrived_s
                _logger.warning("unisono.watch: %s continued after %.0f s", wait, waited_s)

    def _holds_still(self, report: Report, key: tuple[tuple[int, int], int]) -> bool:
        """Whether our call still waits, and for the same ranks: asking all takes time, and the
        answer of one that has come meanwhile does not explain the wait."""
        self._retire()
        me = os.getpid()
        found = waits(with_creations(read_process(me, _LAST)), me)
        for wait in found:
            if _key(wait) == key:
                is_own = (report.group, report.call) == (wait.group.name, wait.record.call)
                is_hang = is_own and report.kind == "hang" and report.call is not None
                return not is_hang or set(report.culprits) <= set(wait.missing())
        return False

    def _look_for_differences(self, groups: list[GroupRecords]) -> None:
        """Find calls that differ (unisono's own groups compare those themselves), and shifted
        ranks."""
        before, self._compared = self._compared, {group.segment: group for group in groups}
        for group in groups:
            is_known = before.get(group.segment) == group or not _may_differ(group)
            if is_known or (group.segment, -1) in self._reported:
                continue
            if group.backend != "unisono" and diagnose.mismatch([group]) is not None:
                report = diagnose.mismatch([_with_all_records(group)])
                if report is not None:
                    self._tell_mismatch(group, report)
            elif (number := diagnose.unbalanced(group)) is not None:
                report = diagnose.unequal_splits(group, number, self._sizes_of(group, number))
                self._tell_mismatch(group, report)
            elif (group.segment, _SHIFTED) not in self._reported:
                self._tell_shift(group, diagnose.shifted_by_lines(group))

    def _tell_mismatch(self, group: GroupRecords, report: Report) -> None:
        """Report that calls differ, once; the job may end because of it."""
        if self._is_lowest(group):  # which asks all others where they are
            report = diagnose.with_stacks(report, group, look_at_job(self.where, 1).where)
        if self._keep(report, (group.segment, -1)) and self._is_lowest(group):
            _logger.warning("unisono.watch: %s", report)
            tell_launcher(report.to_text())

    def _sizes_of(self, group: GroupRecords, number: int) -> PairwiseSizes | None:
        """How every rank split an all_to_all, as far as they tell, after its own watch saw that the
        parts do not fit, or was asked; None if that does not show which."""
        end = time.monotonic() + _TOLD_S
        told: dict[int, Any] = {}
        for links in open_links() if group.is_part else ():
            asked = [member.global_rank for member in group.ranks]
            for answer in links.ask_ranks(asked, SPLITS, [group.name, number], _TOLD_S).values():
                told |= {int(rank): sizes for rank, sizes in answer.items() if sizes}
        while time.monotonic() < end and len(told) < group.size:
            own = self.tell_splits((group.name, number))
            told |= {rank: sizes for rank, sizes in own.items() if sizes}
            if group.is_part:
                break
            time.sleep(_BUSY_TICK_S)
        unknown = [None] * group.size
        rows = [told.get(rank, (unknown, unknown)) for rank in range(group.size)]
        sizes = PairwiseSizes([row[0] for row in rows], [row[1] for row in rows])
        return sizes if sizes.unequal_pairs() else None

    def tell_splits(self, about: Sequence[Any]) -> dict[int, Any]:
        """How the ranks of this host split a call of a group: its name, and the call's number."""
        watched = next((each for each in watched_groups if each.ledger.name == about[0]), None)
        return {} if watched is None else dict(watched.tell_splits(about[1]))

    def _look_at_steps(self) -> None:
        """Find ranks that made a different number of calls in a step; even unisono's own groups
        cannot see that by comparing calls."""
        if not steps.are_counted:
            return
        for group in [*_whole(read_process(os.getpid(), _LAST_OF_STEPS)), *self._over_hosts]:
            if (group.segment, _SHIFTED) in self._reported or (group.segment, -1) in self._reported:
                continue
            known = self._steps.setdefault(group.segment, steps.Steps())
            self._tell_shift(group, diagnose.shifted_in_step(group, known))

    def _tell_shift(self, group: GroupRecords, report: Report | None) -> None:
        """Report that a rank is shifted, once; the program may continue."""
        if report is None or not self._keep(report, (group.segment, _SHIFTED)):
            return
        if self._is_lowest(group):
            _logger.warning("unisono.watch: %s", report)

    def _look_for_slow_ranks(self, groups: list[GroupRecords], at_the_end: bool = False) -> None:
        """Report that the others wait for one rank after a while, and again at the end if much has
        been added."""
        for group in groups:
            is_mine = group.ranks[0].pid == os.getpid() and group.ranks[0].host in ("", own_host())
            if len(group.ranks) < max(2, group.size) or not is_mine:
                continue
            known = self._slowness.setdefault(group.segment, Slowness())
            known.look(group, self._where_now)
            told_s = self._slow_told_s.get(group.segment, 0.0)
            is_known = known.places.total() >= _SEEN or at_the_end
            patience = 1 if is_known else _PATIENT_TIMES
            enough_s = 2 * told_s or patience * self.settings.hang_s
            if known.seen_s < enough_s or (told_s and not at_the_end):
                continue
            report = known.report(group)
            if report is not None and self._keep(report, (group.segment, _SLOW)):
                self._slow_told_s[group.segment] = known.seen_s
                _logger.warning("unisono.watch: %s", report)

    def _is_lowest(self, group: GroupRecords) -> bool:
        """Whether this process is the lowest living rank of a group, or alone sees all of it."""
        if any(group is known for known in self._over_hosts):
            return True
        living = [member for member in group.ranks if not state_of(member.pid).has_ended]
        return bool(living) and living[0].pid == os.getpid()

    def _keep(self, report: Report, key: tuple[tuple[int, int], int], how: str = "seen") -> bool:
        """Remember a report and its `key`, so that it is made only once; returns whether it is
        new."""
        self._reported.add(key)
        if any(known.verdict == report.verdict for known in self.reports):
            return False
        self.reports.append(report)
        self.save(report, how)
        return True

    def save(self, report: Report, how: str) -> None:
        """Write a report to the folder for reports, if there is one. `how` starts the file's name:
        "seen" by the watch, or "raised" in an exception."""
        if not self.settings.folder:
            return
        self._saved += 1
        name = f"{how}-{report.kind}-{os.getpid()}-{self._saved}.json"
        try:
            report.save(os.path.join(self.settings.folder, name))
        except OSError as error:
            _logger.warning("unisono.watch: a report could not be saved: %s", error)

    def _asks_for_host(self, wait: Wait) -> bool:
        """Whether this rank asks where all others are. In a group over hosts the lowest waiting
        rank of each host asks; from the ninth host on it waits longer."""
        if not wait.group.is_part:
            return True
        states = {
            other.member.rank: state_of(other.member.pid)
            for other in waits(snapshot([os.getpid()], _LAST))
            if _is_same(other, wait)
        }
        able = [rank for rank, state in states.items() if not (state.is_stopped or state.has_ended)]
        if able and min(able) != wait.member.rank:
            return False
        patience = _PATIENT_TIMES if host_number() >= EAGER_HOSTS else 1
        return time.monotonic() - wait.record.arrived_s > patience * self.settings.hang_s

    def _is_only_posted(self, wait: Wait, groups: list[GroupRecords]) -> bool:
        """Whether a message was begun early: the program is elsewhere, or makes other calls."""
        if wait.record.tag is None or wait.group.backend == "nccl":
            return False
        recently_s = time.monotonic() - self.settings.hang_s
        newest = [call.record for call in newest_calls(groups, os.getpid())]
        return not self._where_now(wait.member.process).in_call or any(
            record.arrived_s > recently_s or (record.tag is None and record.state in IN_FLIGHT)
            for record in newest
            if record.arrived_s > wait.record.arrived_s
        )

    def _speaks(self, view: JobView, wait: Wait, report: Report) -> bool:
        """Whether this rank logs it: the lowest rank that waits in the reported call and can log.
        Others may wait for it elsewhere."""
        if report.kind == "cycle" and not wait.group.is_part:
            return wait.member.global_rank == min(rank.global_rank for rank in report.ranks)
        about = report.group, report.call, report.operation
        alike = [
            other
            for other in waits(view.groups)
            if (other.group.name, other.record.call, other.record.operation) == about
            and not other.is_for_anybody()
        ] or [wait]
        if report.kind == "cycle":  # of several calls: the rank that asks for its host may log it
            alike = [other for other in waits(view.groups) if _is_in(other.member, report)]
        waiting = [
            other.member.global_rank
            for other in waits(view.groups)
            if any(_is_same(other, known) for known in alike)
            and not view.where(other.member.process).state
        ]
        return not waiting or wait.member.global_rank == min(waiting)

    def where(self, process: Process) -> diagnose.Whereabouts:
        """Where a process of this host is."""
        return whereabouts(process[1], self.endings, self._stack_server.answer_if_asked)

    def _where_now(self, process: Process) -> diagnose.Whereabouts:
        """The same for frequent questions; of other hosts, what they just said."""
        if process[0] not in ("", own_host()):
            ask = self._where_over_hosts
            return diagnose.Whereabouts() if ask is None else ask(process)
        return whereabouts(process[1], {}, self._stack_server.answer_if_asked, with_children=False)


def _own_newest_calls() -> list[Wait]:
    me = os.getpid()
    return newest_calls(read_process(me, 1), me)


def _whole(groups: Iterable[GroupRecords]) -> list[GroupRecords]:
    """Without groups that span hosts; with many hosts each looks at its own."""
    are_many = any(links.hosts.count > EAGER_HOSTS for links in open_links())
    return [group for group in groups if are_many or not group.is_part]


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


def _moves(group: GroupRecords) -> bool:
    """Whether data still moves in a group, however slowly."""
    time.sleep(_STANDS_STILL_S)
    now = [known for known in read_process(os.getpid(), 1) if known.segment == group.segment]
    before = {member.rank: member.progress for member in group.ranks}
    return any(before[member.rank] != member.progress for known in now for member in known.ranks)


def _key(wait: Wait) -> tuple[tuple[int, int], int]:
    """The key of a call of this process."""
    return wait.group.segment, wait.record.number


def _is_same(other: Wait, wait: Wait) -> bool:
    """Whether another rank waits in the same call; a message belongs to one rank."""
    if other.group.segment != wait.group.segment or other.record.call != wait.record.call:
        return False
    return wait.record.call is not None or other.member.rank == wait.member.rank


def _is_in(member: RankRecords, report: Report) -> bool:
    return any((rank.host, rank.pid) == member.process for rank in report.ranks)
