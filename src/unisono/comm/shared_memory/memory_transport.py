"""Shared memory: the transport of ranks on one machine."""

from __future__ import annotations

import contextlib
import os
from array import array
from functools import cached_property
from typing import TYPE_CHECKING, Any

from unisono.comm.engine import OF_PROGRAM, open_group
from unisono.comm.engine.numbers import Operation, Status
from unisono.comm.meeting.membership import JoinRequest, Member, Membership, meet_at, meet_by
from unisono.comm.meeting.unix_socket import RendezvousServer
from unisono.comm.shared_memory.engine_transport import EngineTransport, told_of_deaths
from unisono.comm.shared_memory.exceptions import NEEDED_LATER
from unisono.comm.tensors import address_of, count
from unisono.comm.transport import DEFAULT_TIMEOUT_S, Transport
from unisono.comm.work import Work
from unisono.errors import GroupError, SegmentError
from unisono.failures import load_soon

if TYPE_CHECKING:
    from unisono.comm.arguments import Call
    from unisono.comm.meeting.board import Board
    from unisono.comm.meeting.survivors import Attempt
    from unisono.comm.shared_memory.allocation import Allocator
    from unisono.comm.shared_tensors import Memory
    from unisono.plan.schedule import Schedule

_MOST_BYTES = 2**63 - 1  # the most that a rank can ask for; none gets so much


_How = tuple[Operation, str | int, int]
"""An operation, an algorithm as `_key_of` has it, and a root."""


class SharedMemory(EngineTransport):
    """A rank of a group on one machine. Made by `connect` and `split`, not by hand."""

    is_on_one_host = True

    @cached_property
    def _compiled(self) -> dict[_How, tuple[str | Schedule, int, int | None, bytes]]:
        """By what a call asks for: that algorithm, where the schedule's mark goes (the root, or the
        reduction of a broadcast, which has a root already), and the schedule for the engine."""
        return {}

    @classmethod
    def connect(
        cls,
        board: Board,
        rank: int,
        size: int,
        *,
        name: str = "world",
        global_ranks: tuple[int, ...] | None = (),
        timeout_s: float = DEFAULT_TIMEOUT_S,
        payload: str = "",
    ) -> SharedMemory:
        """Meet the other `size - 1` ranks, which are on this host, on a board and make a group
        with them. `payload` is what this rank publishes to the others: `payloads` has all
        ranks'."""
        request = JoinRequest(
            *(name, rank, size, board.deadline, timeout_s, payload, board.check),
            settle=board.settles,
        )
        with contextlib.closing(RendezvousServer()) as server:
            membership = meet_by(board, server, request)
            load_soon(*NEEDED_LATER)
            ranks = tuple(range(size)) if global_ranks == () else global_ranks
            return cls(membership, server, name, ranks, timeout_s)

    @classmethod
    def alone(
        cls,
        name: str = "world",
        global_ranks: tuple[int, ...] | None = (0,),
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> SharedMemory:
        """A group of this process only, in its own memory: it has no descriptor and no thread."""
        group = open_group(-1, 0, 1, 0, timeout_s)
        membership = Membership(name, 0, 1, group, (Member("here", os.getpid()),))
        with contextlib.closing(RendezvousServer()) as server:
            made = cls(membership, server, name, global_ranks, timeout_s)
        made.devices = ("cpu", "cuda")
        return made

    @property
    def payloads(self) -> tuple[str, ...]:
        """What each rank published to the others when they met."""
        return self.membership.payloads

    # -- calls -------------------------------------------------------------------------------------

    def run_schedule(
        self, call: Call, algorithm: str | Schedule, schedule: Schedule, async_op: bool
    ) -> Work | None:
        """An all_reduce or a broadcast by an algorithm's schedule. Raises ValueError for one that
        is too large for the engine, ScheduleError for a wrong one: no peer has seen the call
        then."""
        from unisono.comm.on_rows.mismatches import algorithm_mark
        from unisono.comm.schedules.compiled_schedules import compile_schedule

        how = call.operation, _key_of(algorithm), call.root
        if how not in self._compiled:
            encoded = compile_schedule(schedule, self.rank).encode()
            most = 255 if call.reduction is None else 0x7FFF
            mark = algorithm_mark(schedule.algorithm, most)
            place = (call.root, mark) if call.reduction is None else (mark, None)
            self._compiled[how] = algorithm, *place, encoded
        _, root, number, encoded = self._compiled[how]
        return self._run_all(call, async_op, root, encoded, number)

    def run_again(
        self, operation: Operation, output: Any, input: Any, root: Any, op: Any, algorithm: Any
    ) -> int:
        is_plain = type(root) is int and not isinstance(op, int)
        known = self._compiled.get((operation, _key_of(algorithm), root)) if is_plain else None
        if known is None:
            return Status.ASK_AGAIN
        _, root, number, encoded = known
        return self.group.run(
            operation, output, input, root, op if number is None else number, 1.0, encoded
        )

    # -- groups ------------------------------------------------------------------------------------

    def split(self, members: tuple[int, ...], name: str) -> Transport:
        return split_here(self, members, name)

    def shrink(self, name: str, at_least: int, timeout_s: float, store: Any) -> Transport:
        from unisono.comm.meeting.survivors import SegmentVote, go_on

        self.end_for_survivors()
        vote = SegmentVote(self.membership, self.name)
        made, members = go_on(vote, at_least, timeout_s, self._meet_left)
        known = self.global_ranks
        global_ranks = None if known is None else tuple(known[rank] for rank in members)
        if made is None:
            return SharedMemory.alone(name, global_ranks, self.timeout_s)
        return SharedMemory(made, self.server(), name, global_ranks, self.timeout_s)

    def _meet_left(self, attempt: Attempt) -> Membership | None:
        """Meet the survivors; None: this rank is alone."""
        server = self.server()
        if len(attempt.members) == 1:
            attempt.settle(True)
            return None
        before = self.membership
        request = JoinRequest(
            attempt.name,
            attempt.members.index(self.rank),
            len(attempt.members),
            attempt.deadline,
            self.timeout_s,
            check=attempt.check,
            settle=attempt.settle,
        )
        return meet_at(before.members[attempt.members[0]].address, server, request)

    # -- memory that all ranks map -----------------------------------------------------------------

    @cached_property
    def _allocator(self) -> Allocator:
        from unisono.comm.shared_memory.allocation import Allocator  # rarely needed

        return Allocator(self.membership, self.name)

    def allocate(self, size_bytes: int) -> Memory | None:
        self.server()  # the group is open
        if self.group.state()["descriptor"] < 0:  # a group of one
            return None
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
        return None if self.is_closed else self._allocator.find(address)

    def own_parts(self) -> list[tuple[int, int, int]]:
        return [] if self.is_closed else self._allocator.own_parts()

    def memory(self, number: int) -> Memory | None:
        return self._allocator.memory(number)

    def check_message(self, sends: bool, peer: int | None) -> None:
        if self.size == 1:
            raise ValueError("a group of one has no other rank to exchange messages with")

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

    # -- decisions ---------------------------------------------------------------------------------

    def decide(self, serial: int, value: int) -> int:
        decided = self.group.decide(OF_PROGRAM, serial, value)
        if decided < 0:  # the group is closed, or this is a forked child
            ending = self.ending("no call")
            raise ending or ValueError(f"too many decisions have followed number {serial}")
        return decided


def _key_of(algorithm: Any) -> str | int:
    """A schedule is known by its address: to compare two takes long."""
    return algorithm if type(algorithm) is str else id(algorithm)


def split_here(group: EngineTransport, members: tuple[int, ...], name: str) -> Transport:
    """A group of these ranks of a group, which are all on this host."""
    server = group.server()
    known, timeout_s = group.global_ranks, group.timeout_s
    global_ranks = None if known is None else tuple(known[rank] for rank in members)
    if len(members) == 1:
        return SharedMemory.alone(name, global_ranks, timeout_s)
    check = group.check_of_split(members)
    with told_of_deaths(check):
        membership = group.meet(members, name, check)
    return SharedMemory(membership, server, name, global_ranks, timeout_s)
