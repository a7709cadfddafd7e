"""One member of a group over hosts: what every call goes through, and how the group ends."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from sys import _getframe as _caller
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from unisono.comm.engine import native
from unisono.comm.hosts.call_records import CallRecords
from unisono.comm.hosts.causes import Cause, decode_cause, late_cause
from unisono.comm.hosts.link import Frame, Kind, Link
from unisono.comm.hosts.links import Answer, GroupMembers, Links
from unisono.comm.hosts.local_failures import cause_of
from unisono.comm.hosts.mailbox import Mailbox, fill
from unisono.comm.hosts.meeting import Findings, Meeting
from unisono.comm.hosts.placement import Placement
from unisono.comm.on_rows.announced_calls import AnnouncedCall
from unisono.comm.on_rows.row_transport import RowTransport
from unisono.comm.on_rows.thread_executor import INTERRUPTED, ThreadExecutor
from unisono.comm.shared_memory import exceptions
from unisono.comm.shared_memory.group_parts import Part
from unisono.comm.work import Work
from unisono.errors import CollectiveMismatch, GroupClosed, GroupError, PeerLost
from unisono.processes import state_of

if TYPE_CHECKING:
    from unisono.comm.communicator import Communicator

_GRACE_S = 1.0
"""How much longer a rank waits for those of its own host: who waits for another host misses
exactly the rank that has not come."""
_TELL_S = 1.0
_REFUSAL_S = 5.0
"""How long a rank that leaves waits for the others to hear what it has refused."""
_ANSWER_S = 0.5
"""How long a rank that did not come may take to say where it is."""


class HostsGroup(RowTransport):
    """One member, without collectives and messages. `local` is the group of the members on this
    host, `links` what connects this process to other hosts."""

    def __init__(
        self,
        links: Links,
        placement: Placement,
        local: Communicator,
        name: str,
        global_ranks: tuple[int, ...] | None,
        timeout_s: float,
    ) -> None:
        self.rank = placement.rank
        self.size = len(placement.members)
        self.name = name
        self.global_ranks = global_ranks
        self.placement = placement
        self.local = local
        self.timeout_s = timeout_s
        self.links = links.share()
        self.key = links.next_key(name)
        self.mailbox = Mailbox()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._cause: GroupError | None = None
        self._left: set[int] = set()
        self._reporting = threading.Lock()
        self._is_reported = False
        self._turn = threading.Lock()
        self._thread = ThreadExecutor(name)
        self._refusal: Work | None = None
        self.calls = 0
        self.doing = ""
        self.limit_s = timeout_s
        self._end = 0.0
        self._awaited = -1
        self._meeting = Meeting(self)
        self._has_met = False
        host = links.hosts.names[links.hosts.mine]
        # Worlds have the same keys: only the secret tells their records on one machine apart.
        digest = hashlib.blake2b(self.key, key=links.hosts.secret[:64], digest_size=8)
        part = Part(digest.hexdigest(), self.rank, self.size, host)
        global_rank = self.rank if global_ranks is None else global_ranks[self.rank]
        self.records = CallRecords(local, name, part, global_rank)
        self._described = GroupMembers(name, part.key, placement.members)
        links.add(self)
        try:
            links.connect(placement.neighbours(), timeout_s)
        except BaseException:
            links.remove(self)
            links.close()
            self.records.close()
            raise

    @property
    def timeout_s(self) -> float:
        """How long a call waits for its peers."""
        return self._timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self._timeout_s = self.local.timeout_s = seconds

    # -- how it ends -----------------------------------------------------------------------------

    def _raise_if_ended(self) -> None:
        ending = self._cause or self._forked()
        if ending is not None:
            raise copy.copy(ending)

    def _forked(self) -> GroupError | None:
        if os.getpid() == self._pid:
            return None
        text = f"group {self.name} belongs to the parent process (pid {self._pid}): a forked "
        return GroupClosed(f"{text}child cannot use it", rank=self.rank, group=self.name)

    @property
    def errored(self) -> GroupError | None:
        if self._cause is None:
            self._look_at_local()
        return self._cause

    def ending(self, doing: str) -> GroupError | None:
        ending = self._cause or self._forked() or self.errored
        return None if ending is None else copy.copy(ending)

    def loss_among(self, ranks: Sequence[int], doing: str) -> GroupError | None:
        """What to raise because one of these ranks has died."""
        ending = self.errored
        return ending if isinstance(ending, PeerLost) and ending.peer in ranks else None

    def _look_at_local(self) -> None:
        """End with the group of this host, if that has ended."""
        error = self.local.errored
        if error is not None and self._cause is None:
            self.end(cause_of(error, self))

    def end(self, cause: Cause, *, tell: bool = True) -> GroupError:
        """The group ends, unless it has ended before: then by that. With `tell` the other hosts
        learn of it; this one always does."""
        with self._lock:
            if self._cause is not None:
                return copy.copy(self._cause)
            title = self._title_of(cause)
            self._cause = cause.error(self.rank, self.name, self.doing, title)
        self.mailbox.wake()
        if len(self.placement.here) > 1:
            self.local.abort(cause.note())
        for link in filter(None, map(self.links.peer, self.placement.neighbours())):
            link.wake()
        if tell:
            for peer in self.placement.neighbours():
                self.links.tell_ending(peer, self.key, cause.encode())
        return copy.copy(self._cause)

    def _tell_closed(self) -> None:
        """Tell our neighbours on other hosts, behind all data that is on its way to them."""
        end = time.monotonic() + _TELL_S

        def check() -> None:
            if time.monotonic() > end:
                raise TimeoutError

        for peer in self.placement.neighbours():
            link = self.links.peer(peer)
            if link is not None:
                try:
                    link.send(Kind.CLOSED, self.key, check=check)
                except TimeoutError:
                    continue

    def abort(self, reason: str = "") -> None:
        if self._cause is not None:
            return
        text = f"rank {self.rank} ended group {self.name}" + (f": {reason}" if reason else "")
        self.end(Cause("GroupAborted", text, peer=self.rank, reason=reason))

    def decide(self, serial: int, value: int) -> int:
        return self.links.decide(self.key, serial, value, self.timeout_s)

    def close(self) -> None:
        if self._refusal is not None and os.getpid() == self._pid:
            with contextlib.suppress(Exception):  # else the others would miss this rank in the call
                self._refusal.wait(_REFUSAL_S)
        text = f"group {self.name} is closed"
        can_finish = self._cause is None and os.getpid() == self._pid
        if can_finish and not self._thread.settle(lambda: self._has_met) and self._awaited >= 0:
            absent = self.name_rank(self.placement.members.index(self._awaited))
            text += f": {absent} never joined what rank {self.rank} had begun"
        with self._lock:
            if isinstance(self._cause, GroupClosed):
                return
            before, self._cause = self._cause, GroupClosed(text, rank=self.rank, group=self.name)
        if os.getpid() != self._pid:
            return
        if before is None:
            self._tell_closed()
        self.mailbox.wake()
        self.local.close()
        self.records.close()
        self._thread.close()
        self.links.remove(self)
        self.mailbox.clear()
        self.links.close()

    # -- what the links bring, in their threads --------------------------------------------------

    def on_frame(self, peer: int, frame: Frame) -> None:
        """A frame has arrived from the process of a global rank."""
        if frame.kind == Kind.DATA:
            self.mailbox.put(peer, frame)
        elif frame.kind == Kind.CLOSED:
            self._has_left(peer)

    def on_ending(self, text: str) -> None:
        """A rank of another host has ended the group, and told all hosts why."""
        cause = decode_cause(text)
        if cause is not None:
            self.end(cause, tell=False)

    def describe(self) -> GroupMembers:
        return self._described

    def on_lost(self, peer: int, why: str) -> None:
        """The process of a global rank has ended, or cannot be reached any more."""
        if peer not in self.placement.members:
            return
        if not why:
            self._has_left(peer)
            return
        rank = self.placement.members.index(peer)
        text = f"{self.name_rank(rank)} {why}"
        self.end(Cause("PeerLost", text, peer=rank), tell=False)  # every host sees it by itself

    def on_probe(self, probe: dict[str, Any]) -> None:
        """A rank that waits for a message looks for a deadlock."""

    def _has_left(self, peer: int) -> None:
        self._left.add(peer)
        self.mailbox.wake()

    @property
    def host_names(self) -> list[str]:
        """The name of each rank's host."""
        hosts = self.links.hosts
        return [hosts.names[hosts.host_of(member)] for member in self.placement.members]

    def name_rank(self, rank: int) -> str:
        """A rank in exceptions: "rank 1 (global 3, pid 17 on node7)"."""
        hosts, member = self.links.hosts, self.placement.members[rank]
        known = "" if member == rank else f"global {member}, "
        host = hosts.names[hosts.host_of(member)]
        return f"rank {rank} ({known}pid {hosts.pids[member]} on {host})"

    # -- bytes between hosts, for the call under way -----------------------------------------------

    def link(self, peer: int) -> Link:
        """The connection to a global rank."""
        link = self.links.peer(peer)
        assert link is not None, f"rank {self.rank} has no connection to {peer}"
        return link

    def send_row(self, peer: int, stage: int, row: torch.Tensor) -> None:
        """Send a row of bytes to a global rank. Stages of a call are streams of their own."""
        self._awaited = peer
        self.link(peer).send_row(self.key, self._tag(stage), row, self.check)
        self._awaited = -1

    def take_frame(self, peer: int, stage: int) -> Frame:
        """The next frame of a global rank in a stage of this call."""
        late = lambda: self._raise_late(peer)  # noqa: E731
        self._awaited = peer
        frame = self.mailbox.take(peer, self._tag(stage), self._end, self.check_peer, late)
        self._awaited = -1
        return frame

    def take_row(self, peer: int, stage: int, row: torch.Tensor) -> None:
        """Fill a row of bytes with what a global rank sends in a stage of this call."""
        fill(row, lambda: self.take_frame(peer, stage))

    def _tag(self, stage: int) -> int:
        return self.calls * 16 + stage

    def check(self) -> None:
        """Raise if the group has ended."""
        if self._cause is None:
            self._look_at_local()
        if self._cause is not None:
            raise copy.copy(self._cause)

    def check_peer(self, peer: int) -> None:
        """Raise if the group has ended, or the process that we wait for has left it."""
        self.check()
        if peer in self._left:
            rank = self.placement.members.index(peer)
            text = f"{self.name_rank(rank)} has left group {self.name}"
            raise self.end(Cause("PeerLost", text, peer=rank, call=self.calls))

    def _raise_late(self, peer: int) -> NoReturn:
        """A rank did not come by the deadline, or it waits in the call for one that is stopped; or
        it has come, and waits for us or is further on: what it has sent does not arrive."""
        answer = self.links.ask_where(peer, _ANSWER_S, self.key)
        self.check()  # meanwhile we may have heard more
        stopped = [*answer.stopped, *self.answer().stopped]
        rank = self.placement.members.index(peer)
        is_waiting = answer.call == self.calls and answer.awaited == self.links.me
        if not stopped and (is_waiting or answer.call > self.calls):  # it has come
            raise self.end(Cause("CollectiveTimeout", "", call=self.calls, apart=(self.rank, rank)))
        if not stopped and answer.awaited >= 0:
            time.sleep(_ANSWER_S)  # until it asks in its turn, and tells all
            self.check()
        late = [self.placement.members.index(member) for member in stopped] or [rank]
        how = "is stopped" if stopped else f"is at {answer.at}" if answer.at else "did not answer"
        lines = [f"  rank {rank} {how}" for rank in late]
        raise self.end(late_cause(late, "\n".join(lines), self.calls))

    def answer(self) -> Answer:
        """What keeps this rank, for one that waits for it in a call."""
        members, pids = self.placement.members, self.links.hosts.pids
        here = [members[rank] for rank in self.placement.here]
        stopped = tuple(member for member in here if state_of(pids[member]).is_stopped)
        return Answer("", stopped, self._awaited, self.calls)

    def _title_of(self, cause: Cause) -> str:
        """What a member says first, where the cause has only the details."""
        if cause.cycle:
            circle = " -> ".join(map(str, [*cause.cycle, cause.cycle[0]]))
            return f"deadlock in group {self.name}: ranks {circle} wait for each other"
        if not (cause.missing or cause.apart) or not cause.call:
            return ""
        call = f"call #{cause.call} of " if self.doing else ""
        what = f"{self.doing or 'a call'} ({call}group {self.name})"
        what += f" reached its timeout of {self.limit_s:g} s"
        if cause.apart:
            return (
                f"{what}: {' and '.join(map(self.name_rank, cause.apart))} have both come, but the "
                "data between them does not arrive, though short messages do. The network drops "
                "large packets (compare the MTU of all interfaces on the way; try ping -M do "
                "-s 1472), or is too slow for this timeout"
            )
        late = [self.name_rank(rank) for rank in cause.missing[:4]]
        late += [f"{len(cause.missing) - 4} more"] if len(cause.missing) > 4 else []
        return f"{what} because {', '.join(late)} never came"

    # -- calls -----------------------------------------------------------------------------------

    def announce(
        self,
        text: str,
        sends: Sequence[int] = (),
        takes: Sequence[int] = (),
        timeout_s: float | None = None,
    ) -> AnnouncedCall:
        self._raise_if_ended()
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        site = native.site_of(_caller(1)) or ""  # the innermost line that is not ours
        return AnnouncedCall(text, sends, takes, timeout_s=limit_s, site=site)

    def carry_out(
        self, call: AnnouncedCall, job: Callable[[], None], tensors: list[Any], async_op: bool
    ) -> Work | None:
        record = self.records.begin_call(call, tensors)

        def carried_out() -> None:
            try:
                self._carry_out(call, job)
            except BaseException:
                self.records.end(record, failed=True)
                raise
            self.records.end(record)

        if async_op:
            return self._thread.begin(carried_out, call.operation)
        try:
            if self._thread.is_idle():
                with torch.inference_mode():  # tensors of either kind may be written to
                    carried_out()
            else:
                self._thread.begin(carried_out, call.operation).wait()
        except BaseException:
            self.abort(INTERRUPTED)  # unless the call has failed, which ended it already
            raise
        return None

    def _carry_out(self, call: AnnouncedCall, job: Callable[[], None]) -> None:
        with self._turn:
            self._raise_if_ended()
            self.calls += 1
            self.doing = call.operation
            self.limit_s = call.timeout_s
            self._end = time.monotonic() + call.timeout_s
            self.local.timeout_s = call.timeout_s + _GRACE_S
            self._has_met = False
            try:
                job()
                if not self._has_met:
                    self._meet(call)
            except GroupError as error:
                raise self.with_report(self._translate(error.with_traceback(None))) from None
            finally:
                self.doing = ""
                self.local.timeout_s = self.timeout_s

    def _translate(self, error: GroupError) -> GroupError:
        """What a member raises for an exception of its host's group, or of its own. That one shows
        no lines then, and should come without them: they hold on to everything that was in use."""
        if self._cause is None:
            self.end(cause_of(error, self))
        assert self._cause is not None
        return copy.copy(self._cause)

    def with_report(self, error: GroupError) -> GroupError:
        """The exception with what the watch has to say of it, where there is one; asking all ranks
        takes time, so once."""
        if exceptions.diagnose is None or self._cause is None or isinstance(error, GroupClosed):
            return error
        with self._reporting:
            if not self._is_reported:
                self._is_reported = True
                self._cause.report = exceptions.diagnose(self._cause)
        return copy.copy(self._cause)

    def _translated(self, wait: Callable[[], None], work: Work) -> None:
        """Wait for a work of this host's group. That it is not over yet is no end."""
        try:
            wait()
        except GroupError as error:
            if not work.is_completed():
                raise
            raise self._translate(error.with_traceback(None)) from None

    def _meet(self, call: AnnouncedCall, payload: torch.Tensor | None = None) -> Findings:
        """Compare with what the others are about to do."""
        try:
            findings = self._meeting.hold(call, payload)
            self._has_met = True
            return findings
        except CollectiveMismatch as error:  # which all see
            with self._lock:
                self._cause = self._cause or error
            raise

    def refuse(self, operation: str) -> None:
        if self._cause is None:
            site = native.site_of(_caller(1)) or ""
            call = AnnouncedCall(operation, refused=True, timeout_s=self.timeout_s, site=site)
            job = lambda: self._carry_out(call, lambda: None)  # noqa: E731
            self._refusal = self._thread.begin(job, operation)
