"""Shared memory: the transport of ranks on one machine. The engine runs every call as a whole."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from sys import is_finalizing
from typing import TYPE_CHECKING, Any

from unisono import variables
from unisono.comm.engine import abandon_group, end_abandoned_groups, engine_ns, native, works
from unisono.comm.engine.numbers import REDUCTION_NUMBERS, Note, Operation, Status
from unisono.comm.meeting.deadline import JOIN_TIMEOUT_S, LATECOMERS_S, Deadline
from unisono.comm.meeting.makings import SHRINKS, GroupsDiffer
from unisono.comm.meeting.membership import JoinRequest, Membership, meet_at, meet_by
from unisono.comm.meeting.unix_socket import RendezvousServer
from unisono.comm.reductions import Reduction, known_reduction
from unisono.comm.shared_memory.exceptions import NEEDED_LATER, GroupExceptions
from unisono.comm.shared_memory.segment_listeners import announce_segment
from unisono.comm.tensors import address_of, count, dtype_name
from unisono.comm.transport import DEFAULT_TIMEOUT_S, Transport
from unisono.comm.work import Work, join_works
from unisono.errors import GroupError, RendezvousError, SegmentError
from unisono.failures import load_soon

if TYPE_CHECKING:
    from unisono.comm.arguments import Call
    from unisono.comm.engine.group_types import Gathered, Group
    from unisono.comm.meeting.announcements import Announcements
    from unisono.comm.meeting.survivors import Attempt
    from unisono.comm.shared_memory.allocation import Allocator
    from unisono.comm.shared_tensors import Memory
    from unisono.plan.schedule import Schedule

_LISTS = (list, tuple)
_NOTE_BYTES = 248  # csrc/unisono.h: UN_TEXT_BYTES
GROWTHS = 64  # one of the decisions that a segment keeps is for growing
_MOST_BYTES = 2**63 - 1  # the most that a rank can ask for; none gets so much
for _kind in works:
    Work.register(_kind)


class SharedMemory(Transport):
    """A rank of a group on one machine. Made by `connect` and `split`, not by hand."""

    membership: Membership
    tags = range(-(2**63), 2**63)
    _growths = 0
    _refusals = 0
    is_on_one_host = True

    def __init__(
        self,
        membership: Membership,
        server: RendezvousServer,
        name: str,
        global_ranks: tuple[int, ...] | None,
        timeout_s: float,
    ) -> None:
        self.rank = membership.rank
        self.size = membership.size
        self.name = name
        self.global_ranks = global_ranks
        self.membership = membership
        self._server: RendezvousServer | None = server.share()
        self.group: Group = membership.group
        self.fast_path = membership.group
        self.exceptions: GroupExceptions = GroupExceptions(membership, name, global_ranks)
        self._refused_messages: list[Work] = []
        self._compiled_schedules: dict[int, tuple[Schedule, int, bytes]] = {}
        eager_bytes = variables.EAGER_SEND.read()
        self.group.set_eager(-1 if eager_bytes is None else eager_bytes)
        if variables.READ_PEERS.read() is False:
            self.group.forbid_reading()
        if (threads := variables.COPY_THREADS.read()) is not None:
            self.group.set_copiers(threads - 1)
        keeps_sites = variables.SITES.read() or False
        global_rank = self.rank if global_ranks is None else global_ranks[self.rank]
        self.group.introduce(self._name_for_readers(), global_rank, keeps_sites)
        announce_segment(self.group.descriptor)
        self.timeout_s = timeout_s
        end_abandoned_groups()

    def __del__(self, is_finalizing: Callable[[], bool] = is_finalizing) -> None:
        if hasattr(self, "group") and not is_finalizing():  # else this module's names are gone
            abandon_group(self.group)

    @classmethod
    def connect(
        cls,
        announcements: Announcements,
        rank: int,
        size: int,
        *,
        name: str = "world",
        global_ranks: tuple[int, ...] | None = (),
        timeout_s: float = DEFAULT_TIMEOUT_S,
        join_timeout_s: float = JOIN_TIMEOUT_S,
        deadline: Deadline | None = None,
        payload: str = "",
        check: Callable[[], None] = lambda: None,
    ) -> SharedMemory:
        """Meet the other `size - 1` ranks through `announcements` and make a group with them.
        `payload` is what this rank publishes to the others: `payloads` has all ranks'. The
        meeting ends after `join_timeout_s`, or at a `deadline` that has already begun. `check`
        is called during the wait, and raises if the others will not join."""
        deadline = deadline or Deadline(join_timeout_s)
        request = JoinRequest(name, rank, size, deadline, timeout_s, payload, check)
        with contextlib.closing(RendezvousServer()) as server:
            membership = meet_by(announcements, server, request)
            load_soon(*NEEDED_LATER)
            ranks = tuple(range(size)) if global_ranks == () else global_ranks
            return cls(membership, server, name, ranks, timeout_s)

    def _name_for_readers(self) -> str:
        """The name of the group for readers of its records."""
        return self.name

    @property
    def payloads(self) -> tuple[str, ...]:
        """What each rank published to the others when they met."""
        return self.membership.payloads

    @property
    def host_names(self) -> list[str]:
        """The name of each rank's host."""
        return [member.host or os.uname().nodename for member in self.membership.members]

    @property
    def timeout_s(self) -> float:
        return self.group.timeout_ns / 1e9

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self.group.timeout_ns = engine_ns(seconds)

    # -- calls -----------------------------------------------------------------------------------

    def run(self, call: Call, async_op: bool) -> Work | None:
        return self._run_all(call, async_op, call.root, None)

    def run_schedule(self, call: Call, schedule: Schedule, async_op: bool) -> Work | None:
        """An all_reduce or a broadcast by a schedule. Raises ValueError for one that is too
        large for the engine, ScheduleError for a wrong one: no peer has seen the call then."""
        from unisono.comm.on_rows.mismatches import algorithm_mark
        from unisono.comm.schedules.compiled_schedules import compile_schedule

        known = self._compiled_schedules.get(id(schedule))
        if known is None or known[0] is not schedule:
            encoded = compile_schedule(schedule, self.rank).encode()
            most = 255 if call.reduction is None else 0x7FFF
            known = schedule, algorithm_mark(schedule.algorithm, most), encoded
            self._compiled_schedules[id(schedule)] = known
        _, mark, encoded = known
        if call.reduction is None:  # a broadcast has a root, so the schedule's mark goes elsewhere
            return self._run_all(call, async_op, call.root, encoded, mark)
        return self._run_all(call, async_op, mark, encoded)

    def _run_all(
        self,
        call: Call,
        async_op: bool,
        root: int,
        schedule: bytes | None,
        mark: int | None = None,
    ) -> Work | None:
        """One call of the engine or, for a coalesced call, one for each dtype."""
        if call.is_coalesced and not call.outputs:  # peers that have tensors must raise
            return self.barrier(None, async_op)
        op, group = call.reduction, self.group
        number, factor = (mark, 1.0) if op is None else (op.number, op.factor)

        def run(output: Any, input: Any) -> Work | None:
            given = call.operation, output, input, root, number, factor, schedule
            status = group.submit(self.exceptions, *given) if async_op else group.run(*given)
            if not isinstance(status, int):
                return status
            if status in (Status.ASK_AGAIN, Status.ON_DEVICE):
                why = "the engine cannot read this memory"
                self.refuse(call.name, why)
                raise TypeError(f"{call.name} on group {self.name}: {why}")
            if status:
                raise self.call_error(status, call.operation, op, input)
            return None

        return join_works(run(*sides) for sides in _engine_calls(call))

    def barrier(self, timeout_s: float | None, async_op: bool) -> Work | None:
        if timeout_s is None and not async_op:
            status = self.group.barrier()
            if status:
                raise self.call_error(status, Operation.BARRIER, None, None)
            return None
        limit_ns = 0 if timeout_s is None else max(1, engine_ns(timeout_s))
        given = Operation.BARRIER, None, None, 0, None, 1.0, None, limit_ns
        work = self.group.submit(self.exceptions, *given)
        if isinstance(work, int):
            raise self.call_error(work, Operation.BARRIER, None, None)
        if async_op:
            return work
        work.wait()
        return None

    def call_error(self, status: int, operation: int, op: Any, tensors: Any) -> Exception:
        tensor = tensors[0] if type(tensors) in _LISTS and tensors else tensors
        name = op.name if isinstance(op, Reduction) else str(known_reduction(op))
        number = REDUCTION_NUMBERS.get(name, 0)
        return self.exceptions.call_error(status, operation, number, dtype_name(tensor))

    # -- messages --------------------------------------------------------------------------------

    def send(self, tensor: Any, peer: int, tag: int) -> None:
        status = self.group.send(tensor, peer, tag)
        if status < 0:
            raise self.message_error(-status, True, peer, tag)

    def recv(self, tensor: Any, peer: int | None, tag: int) -> int:
        source = self.group.recv(tensor, peer, tag)
        if source < 0:
            raise self.message_error(-source, False, -1 if peer is None else peer, tag)
        return source

    def isend(self, tensor: Any, peer: int, tag: int) -> Work:
        return self.group.isend(self.exceptions, sys._getframe(1), tensor, peer, tag)

    def irecv(self, tensor: Any, peer: int | None, tag: int) -> Work:
        return self.group.irecv(self.exceptions, sys._getframe(1), tensor, peer, tag)

    def message_error(self, status: int, sends: bool, peer: int, tag: int) -> Exception:
        return self.exceptions.message_error(status, sends, peer, tag)

    # -- groups ----------------------------------------------------------------------------------

    def split(self, members: tuple[int, ...], name: str) -> Transport:
        if self._server is None:
            raise self.exceptions.closed()
        known, timeout_s = self.global_ranks, self.timeout_s
        global_ranks = None if known is None else tuple(known[rank] for rank in members)
        if len(members) == 1:
            from unisono.comm.solo import Solo

            return Solo(name, global_ranks, timeout_s)
        check = self._check_of_split(members)
        with told_of_deaths(check):
            membership = self._meet(members, name, check)
        return SharedMemory(membership, self._server, name, global_ranks, timeout_s)

    def _check_of_split(self, members: tuple[int, ...]) -> Callable[[], None]:
        """A check that raises if a member of a new group will not join. Followers on one host may
        wait long for a live leader."""
        late_s = time.monotonic() + LATECOMERS_S
        leads = self.rank == members[0] or not self.is_on_one_host

        def check() -> None:
            error = self.loss_among(members, f"split({list(members)})")
            is_late = leads and time.monotonic() > late_s
            if error is None and (self._server is None or is_late):
                error = self.ending("no call")
            if error is not None:
                raise error

        return check

    def _meet(
        self,
        members: Sequence[int],
        name: str,
        check: Callable[[], None],
        segments: Sequence[tuple[Sequence[int], int, int]] = (),
    ) -> Membership:
        """Meet these ranks of this host to make a group, or one host's part of it."""
        assert self._server is not None
        request = JoinRequest(
            f"{self.membership.key}/{name.removeprefix(self.name)}",
            members.index(self.rank),
            len(members),
            Deadline(self.timeout_s),
            self.timeout_s,
            check=check,
            segments=segments,
        )
        leader = self.membership.members[members[0]]
        check()
        return meet_at(leader.address, self._server, request)

    def shrink(self, name: str, at_least: int, timeout_s: float, store: Any) -> Transport:
        from unisono.comm.meeting.survivors import SegmentBoard, go_on

        self.end_for_survivors()
        board = SegmentBoard(self.membership, self.name)
        made, members = go_on(board, at_least, timeout_s, self._meet_left)
        known = self.global_ranks
        global_ranks = None if known is None else tuple(known[rank] for rank in members)
        if made is None:
            from unisono.comm.solo import Solo

            return Solo(name, global_ranks, self.timeout_s)
        if self._server is None:  # another thread has closed the group
            raise self.exceptions.closed()
        return SharedMemory(made, self._server, name, global_ranks, self.timeout_s)

    def grow(
        self, name: str, meeting: tuple[str, Any], count: int, limit_s: float, generation: int
    ) -> Transport:
        from unisono.comm.meeting.growing import admit, number_newcomers

        self.raise_if_ended()
        assert self._server is not None
        self._growths += 1
        serial = GROWTHS * self._growths

        def settle(made: bool) -> bool:
            return self.group.settle(serial, int(made)) == 1

        about = {"global_ranks": self.global_ranks, "generation": generation}
        address = self.membership.members[0].address
        try:
            membership, growth = admit(
                self, self._server, address, name, meeting, count, limit_s, about, settle
            )
        except (GroupError, RendezvousError):
            raise
        except BaseException as error:  # the others wait for this rank
            self.abort(f"growing failed: {type(error).__name__}")
            raise
        global_ranks = number_newcomers(self.global_ranks, growth.places)
        return SharedMemory(membership, self._server, name, global_ranks, self.timeout_s)

    def end_for_survivors(self) -> None:
        """End the group, so that no rank stays in a call of it. Raises GroupClosed if this
        process cannot continue."""
        if self._server is None:
            raise self.exceptions.closed()
        if self.group.failure()[0] == Status.FORKED:
            raise self.exceptions.forked()
        self.abort(SHRINKS)

    def _meet_left(self, attempt: Attempt) -> Membership | None:
        """Meet the survivors; None: this rank is alone."""
        if self._server is None:
            raise self.exceptions.closed()
        if len(attempt.members) == 1:
            attempt.settle(True)
            return None
        before = self.membership
        request = JoinRequest(
            attempt.key,
            attempt.members.index(self.rank),
            len(attempt.members),
            attempt.deadline,
            self.timeout_s,
            check=attempt.check,
            settle=attempt.settle,
        )
        return meet_at(before.members[attempt.members[0]].address, self._server, request)

    def leave_out(self, members: tuple[int, ...]) -> None:
        self.exceptions.left_out_of = members

    # -- memory that all ranks map --------------------------------------------------------------

    @cached_property
    def _allocator(self) -> Allocator:
        from unisono.comm.shared_memory.allocation import Allocator  # rarely needed

        return Allocator(self.membership, self.name)

    def allocate(self, size_bytes: int) -> Memory | None:
        if self._server is None:
            raise self.exceptions.closed()
        try:
            try:
                allocator, wanted = self._allocator, min(size_bytes, _MOST_BYTES)
            except OSError as error:  # not imported yet, and out of descriptors
                allocator, wanted = None, -(error.errno or 1)
            sizes = self._exchange(array("q", [wanted]))
            if allocator is None or min(sizes) < 0:
                unable = [
                    f"rank {rank} cannot map it: {os.strerror(-size)}"
                    for rank, size in enumerate(sizes)
                    if size < 0
                ]
                raise SegmentError("\n".join([f"group {self.name} cannot share memory", *unable]))
            return allocator.allocate(sizes, self._exchange)
        except (GroupError, SegmentError):
            raise
        except BaseException as error:  # the others wait for this rank
            self.abort(f"making shared memory failed: {type(error).__name__}")
            raise

    def _exchange(self, integers: array[int]) -> list[int]:
        everyone = array("q", bytes(8 * len(integers) * self.size))
        status = self.group.run(Operation.ALLOCATE, everyone, integers, 0, None)
        if status:
            raise self.call_error(status, Operation.ALLOCATE, None, None)
        return everyone.tolist()

    def find_memory(self, address: int) -> tuple[Memory, int] | None:
        return None if self._server is None else self._allocator.find(address)

    def own_parts(self) -> list[tuple[int, int, int]]:
        return [] if self._server is None else self._allocator.own_parts()

    def memory(self, number: int) -> Memory | None:
        return self._allocator.memory(number)

    def check_call(self, call: Call) -> None:
        """Only the peer may pass its part of a block: it may be doing so in this very call."""
        from unisono.comm.arguments import flatten

        for tensor in flatten(call.outputs):
            owner = self.group.owner(address_of(tensor)) if count(tensor) else -1
            if owner not in (-1, self.rank):
                raise ValueError(
                    f"the output is in the memory of rank {owner}: a collective cannot write to "
                    "a view from get_peer_tensor()"
                )

    # -- life ------------------------------------------------------------------------------------

    def refuse(self, operation: str, why: str) -> None:
        if self.exceptions.cause is None:
            self._note_refusal(why)
            self.group.refuse(Operation[operation.upper()])

    def refuse_message(self, sends: bool, peer: int | None, tag: int, why: str) -> None:
        """An empty message of a type that torch lacks: it fits only one that the peer refused."""
        import numpy

        self._note_refusal(why)
        begin = self.group.isend if sends else self.group.irecv
        nothing = numpy.empty(0, numpy.longdouble)
        given = self.exceptions, sys._getframe(1), nothing, peer, tag
        self._refused_messages.append(begin(*given))

    def _note_refusal(self, why: str) -> None:
        self._refusals += 1  # a note about the same would not be written
        text = why.encode("utf-8", "replace")
        text = text if len(text) < _NOTE_BYTES else text[: _NOTE_BYTES - 4] + b"..."
        self.group.write_note(Note.REFUSAL, self._refusals, text.decode("utf-8", "ignore"))

    def abort(self, reason: str = "") -> None:
        self.group.abort(reason)

    def decide(self, serial: int, value: int) -> int:
        decided = self.group.decide(serial, value)
        if decided < 0:  # the group is closed, or this is a forked child
            ending = self.ending("no call")
            raise ending or ValueError(f"too many decisions have followed number {serial}")
        return decided

    def ending(self, doing: str) -> GroupError | None:
        if self._server is None:
            return self.exceptions.closed()
        status = self.group.failure()[0]
        if status == Status.FORKED:
            return self.exceptions.forked()
        return self.exceptions.failure(doing) if status else None

    def raise_if_ended(self) -> None:
        ending = self.ending("no call")
        if ending is not None:
            raise ending

    def loss_among(self, ranks: Sequence[int], doing: str) -> GroupError | None:
        return self.exceptions.loss_among(ranks, doing)

    def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            self.exceptions.closed_at = native.site_of(sys._getframe(1)) or ""
            try:
                absent = self.group.finish()
                if absent is not None:
                    self.group.abort(self.exceptions.close_without(absent))
            finally:
                self.group.close()
                server.close()

    # -- tensors whose shapes only their owners know ---------------------------------------------

    def exchange_integers(
        self, integers: tuple[int, ...], limit_s: float = 0.0
    ) -> list[tuple[int, ...]]:
        everyone = self.group.exchange(integers, engine_ns(limit_s))
        if isinstance(everyone, int):
            raise self.exceptions.call_error(everyone, Operation.ALL_GATHER, 0, "uint8")
        return everyone

    def gather_ragged(
        self,
        tensor: Any,
        root: int | None,
        empty_like: Callable[[Any], Any],
        empty: Callable[[Any, int, tuple[int, ...]], Any],
    ) -> Gathered:
        """Every rank's tensor, in new tensors on `root`, or with None on every rank, if all are
        small; otherwise every rank's dtype and shape. `empty_like(tensor)` makes such a tensor,
        and `empty(tensor, dtype, shape)` any other on its device, of the dtype with this number."""
        gathered = self.group.gather_ragged(tensor, -1 if root is None else root, empty_like, empty)
        if isinstance(gathered, tuple):
            return gathered
        operation = Operation.ALL_GATHER if root is None else Operation.GATHER
        if gathered is None:
            from unisono.comm.arguments import check_tensor

            check_tensor(tensor, False, self.devices)
            raise TypeError("DLPack cannot export this tensor")
        raise self.exceptions.call_error(gathered, operation, 0, "uint8")


@contextlib.contextmanager
def told_of_deaths(check: Callable[[], None]) -> Iterator[None]:
    """If ranks do not meet because one of them has died, raise that, by `check`."""
    try:
        yield
    except RendezvousError as error:
        for _ in range(
            0 if isinstance(error, GroupsDiffer) else 50
        ):  # a death is known in a moment
            check()
            time.sleep(0.01)
        raise


def _engine_calls(call: Call) -> list[tuple[Any, Any]]:
    """Output and input of each of the engine's calls for a call."""
    outputs, inputs = list(map(_given, call.outputs)), list(map(_given, call.inputs))
    if call.operation in (Operation.ALL_REDUCE, Operation.REDUCE, Operation.BROADCAST):
        inputs = outputs
    if not call.is_coalesced:
        return [(outputs[0] if outputs else None, inputs[0] if inputs else None)]
    if any(isinstance(side, list) for side in [*outputs, *inputs]):
        return list(zip(outputs, inputs, strict=True))
    alike: dict[str, list[int]] = {}
    for place, tensor in enumerate(outputs):
        alike.setdefault(dtype_name(tensor), []).append(place)
    calls: list[tuple[Any, Any]] = []
    for places in alike.values():
        to = [outputs[place] for place in places]
        calls.append((to, to if inputs is outputs else [inputs[place] for place in places]))
    return calls


def _given(side: Any) -> Any:
    """A side as the engine takes it: a tensor, or one for each rank."""
    if not hasattr(side, "is_list"):
        return side
    return side.tensors if side.is_list else side.tensors[0]
