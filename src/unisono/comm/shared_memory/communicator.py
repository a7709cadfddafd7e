"""The shared-memory implementation of the Communicator: ranks of one machine."""

from __future__ import annotations

import contextlib
import os
from array import array
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from sys import is_finalizing
from typing import TYPE_CHECKING, Any, NoReturn

from unisono import variables
from unisono.comm.base import (
    DEFAULT_TIMEOUT_S,
    AnyOp,
    Communicator,
    Work,
)
from unisono.comm.engine import (
    OnDevice,
    Operation,
    Status,
    abandon_group,
    end_abandoned_groups,
    engine_ns,
    open_group,
    work_types,
)
from unisono.comm.rendezvous.lobby import Lobby
from unisono.comm.rendezvous.meeting import meet_by
from unisono.comm.rendezvous.membership import JoinRequest, Membership
from unisono.comm.rendezvous.unix_socket import Deadline
from unisono.comm.rendezvous.waiting import JOIN_TIMEOUT_S
from unisono.comm.shared_memory.engine_calls import (
    LISTS,
    REDUCTION_NUMBERS,
    EngineCall,
    EngineCalls,
)
from unisono.comm.shared_memory.exceptions import NEEDED_LATER, GroupExceptions
from unisono.comm.shared_memory.messages import EngineMessages
from unisono.comm.shared_memory.segment_listeners import announce_segment
from unisono.errors import GroupError, RendezvousError, ScheduleError, SegmentError
from unisono.failures import load_soon

if TYPE_CHECKING:
    from unisono.comm.base import Algorithm, Tensor, Tensors
    from unisono.comm.engine_types import Gathered, Group
    from unisono.comm.rendezvous.announcements import Announcements
    from unisono.comm.shared_memory.allocation import Allocator
    from unisono.comm.shared_tensors import Memory
    from unisono.plan.schedule import Schedule

# Looking a member up in its enumeration takes longer than a global.
_ALL_REDUCE, _REDUCE, _BROADCAST = Operation.ALL_REDUCE, Operation.REDUCE, Operation.BROADCAST
_GATHER, _SCATTER, _REDUCE_SCATTER = Operation.GATHER, Operation.SCATTER, Operation.REDUCE_SCATTER
_MOST_BYTES = 2**63 - 1  # what ranks can tell each other that they want; nobody gets so much
_BARRIER: EngineCall = (Operation.BARRIER, 0, 0, 1.0, None)
_ALL_GATHER: EngineCall = (Operation.ALL_GATHER, 0, 0, 1.0, None)
_ALL_TO_ALL: EngineCall = (Operation.ALL_TO_ALL, 0, 0, 1.0, None)
for _kind in work_types():
    Work.register(_kind)


class SharedMemoryCommunicator(EngineCalls, EngineMessages):
    """Ranks of one machine. Made by `connect` and `split`, not by hand."""

    def __init__(
        self,
        membership: Membership,
        lobby: Lobby,
        name: str,
        global_ranks: tuple[int, ...] | None,
        timeout_s: float,
    ) -> None:
        self.rank = membership.rank
        self.size = membership.size
        self.name = name
        self.global_ranks = global_ranks
        self._membership = membership
        self._lobby: Lobby | None = lobby.share()
        self._group = membership.group
        self._all_reduce = membership.group.all_reduce
        self.run_given: Callable[..., int] = membership.group.run_given
        """A blocking call as torch.distributed describes it: an operation, its output, its input
        (None: the call is in place) and options. Returns a status; after ASK_AGAIN no rank has
        heard of the call, and the collective's own method is to be called."""
        self._gather_ragged = membership.group.gather_ragged
        self._barrier = membership.group.barrier
        self._native_run = membership.group.run
        self._send = membership.group.send
        self._recv = membership.group.recv
        self._isend = membership.group.isend
        self._irecv = membership.group.irecv
        self._exceptions = GroupExceptions(membership, name, global_ranks)
        self._compiled_schedules: dict[int, tuple[Schedule, int, bytes]] = {}
        self._algorithm = variables.ALGO.read()
        if self._algorithm is not None:  # the short way knows the engine's own algorithm alone
            self._all_reduce = lambda tensor, op: Status.ASK_AGAIN
            self.run_given = self._run_given_but_all_reduce
        eager_bytes = variables.EAGER_SEND.read()
        self._group.set_eager(-1 if eager_bytes is None else eager_bytes)
        keeps_sites = variables.SITES.read() or False
        global_rank = self.rank if global_ranks is None else global_ranks[self.rank]
        self._group.introduce(name, global_rank, keeps_sites)
        announce_segment(self._group.descriptor)
        self.timeout_s = timeout_s
        end_abandoned_groups()

    def __del__(self, is_finalizing: Callable[[], bool] = is_finalizing) -> None:
        if hasattr(self, "_group") and not is_finalizing():  # then this module's names are gone
            abandon_group(self._group)

    @classmethod
    def connect(
        cls,
        announcements: Announcements,
        rank: int,
        size: int,
        *,
        name: str = "world",
        global_ranks: tuple[int, ...] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        join_timeout_s: float = JOIN_TIMEOUT_S,
        deadline: Deadline | None = None,
        payload: str = "",
        check: Callable[[], None] = lambda: None,
    ) -> SharedMemoryCommunicator:
        """Meet the other `size - 1` ranks through `announcements` and make a group with them.

        `payload` is what the others shall know of this rank: `payloads` has everybody's. The
        meeting ends after `join_timeout_s`, or at a `deadline` that has begun already. `check` is
        called while the others are awaited, and raises when they will not come."""
        deadline = deadline or Deadline(join_timeout_s)
        request = JoinRequest(name, rank, size, deadline, open_with(timeout_s), payload, check)
        with contextlib.closing(Lobby()) as lobby:
            membership = meet_by(announcements, lobby, request)
            load_soon(*NEEDED_LATER)
            return cls(membership, lobby, name, global_ranks or tuple(range(size)), timeout_s)

    def become_part(self, name: str) -> Group:
        """This group is one host's part of a larger one, of which `name` says which: the records of
        that one's calls are kept in its place, by the engine's group, from now on."""
        self._exceptions.is_part = True
        ranks = self.global_ranks
        self._group.become_part(name, self.rank if ranks is None else ranks[self.rank])
        return self._group

    @property
    def payloads(self) -> tuple[str, ...]:
        """What each rank wanted the others to know when they met."""
        return self._membership.payloads

    # -- settings and life ---------------------------------------------------------------------

    @property
    def timeout_s(self) -> float:
        """How long a call waits for its peers."""
        return self._group.timeout_ns / 1e9

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self._group.timeout_ns = engine_ns(seconds)

    def split(
        self, ranks: Sequence[int], label: str = "", *, name: str | None = None
    ) -> Communicator | None:
        """As of all Communicators; `name` is the group's, where it is part of a larger one."""
        members = self._members(ranks)
        if self.rank not in members:
            self._exceptions.left_out_of = members
            return None
        from unisono.comm.shared_memory.splitting import make_split  # few programs have groups

        return make_split(self, members, label, name)

    def _raise_if_ended(self) -> None:
        ending = self.errored
        if ending is not None:
            raise ending

    # -- memory that all ranks have mapped ------------------------------------------------------

    @cached_property
    def _allocator(self) -> Allocator:
        from unisono.comm.shared_memory.allocation import Allocator  # few share tensors

        return Allocator(self._membership, self.name)

    def _allocate(self, size_bytes: int) -> Memory | None:
        if self._lobby is None:
            raise self._exceptions.closed()
        try:
            try:
                allocator, wanted = self._allocator, min(size_bytes, _MOST_BYTES)
            except OSError as error:  # it is not imported yet, and no descriptor is left
                allocator, wanted = None, -(error.errno or 1)
            sizes = self._exchange(array("q", [wanted]))
            if allocator is None or min(sizes) < 0:
                unable = [
                    f"rank {rank} cannot map it: {os.strerror(-size)}"
                    for rank, size in enumerate(sizes)
                    if size < 0
                ]
                raise SegmentError("\n".join([f"no shared memory for group {self.name}", *unable]))
            deadline = Deadline(self.timeout_s)
            check = self._raise_if_ended
            return allocator.allocate(sizes, self._exchange, self._lobby, deadline, check)
        except (GroupError, SegmentError):
            raise
        except BaseException as error:  # the others wait for this rank's word
            why = str(error) if isinstance(error, RendezvousError) else type(error).__name__
            self.abort(f"making shared memory failed: {why}")
            raise

    def _exchange(self, integers: array[int]) -> list[int]:
        everyone = array("q", bytes(8 * len(integers) * self.size))
        self._run((Operation.ALLOCATE, 0, 0, 1.0, None), everyone, integers, False)
        return everyone.tolist()

    def _find_memory(self, address: int) -> tuple[Memory, int] | None:
        return None if self._lobby is None else self._allocator.find(address)

    def _own_parts(self) -> list[tuple[int, int, int]]:
        return [] if self._lobby is None else self._allocator.own_parts()

    def _memory(self, number: int) -> Memory | None:
        return self._allocator.memory(number)

    def _refuse_allocation(self, why: Exception) -> NoReturn:
        self._refuse(Operation.ALLOCATE, str(why), type(why))

    def refuse(self, operation: str, why: str) -> NoReturn:
        self._refuse(Operation[operation.upper()], why)

    def abort(self, reason: str = "") -> None:
        self._group.abort(reason)

    @property
    def errored(self) -> GroupError | None:
        return self.ending("no call")

    def ending(self, doing: str) -> GroupError | None:
        """How the group ended, or None; `doing` is what this rank was about."""
        if self._lobby is None:
            return self._exceptions.closed()
        status = self._group.failure()[0]
        if status == Status.FORKED:
            return self._exceptions.forked()
        return self._exceptions.failure(doing) if status else None

    def loss_among(self, ranks: Sequence[int], doing: str) -> GroupError | None:
        """What to raise because one of these ranks has died, whatever else has ended the group."""
        return self._exceptions.loss_among(ranks, doing)

    def close(self) -> None:
        lobby, self._lobby = self._lobby, None
        if lobby is not None:
            try:
                absent = self._group.finish()
                if absent is not None:
                    self._group.abort(self._exceptions.close_without(absent))
            finally:
                self._close_gpu_group()
                self._group.close()
                lobby.close()

    # -- collectives -----------------------------------------------------------------------------

    def barrier(self, *, timeout_s: float | None = None, async_op: bool = False) -> Work | None:
        if timeout_s is not None:
            return self._barrier_within(timeout_s, async_op)
        if async_op:
            return self._run(_BARRIER, None, None, True)
        status = self._barrier()
        if status:
            self._fail(status, Operation.BARRIER)
        return None

    def _barrier_within(self, timeout_s: float, async_op: bool) -> Work | None:
        """A work takes the group's limit when it is begun: let it find its own."""
        usual_s, self.timeout_s = self.timeout_s, timeout_s
        try:
            work = self._run(_BARRIER, None, None, True)
        finally:
            self.timeout_s = usual_s
        if work is not None and not async_op:
            work.wait()
            return None
        return work

    def all_reduce(
        self,
        tensor: Tensors,
        op: AnyOp = "sum",
        *,
        async_op: bool = False,
        algorithm: str | Schedule | None = None,
    ) -> Work | None:
        if not async_op and algorithm is None:
            try:
                status = self._all_reduce(tensor, op)
            except OnDevice:
                return self._gpu_group().all_reduce(tensor, op)  # type: ignore[arg-type]
            if not status:
                return None
            if status != Status.ASK_AGAIN:
                self._fail(status, Operation.ALL_REDUCE, REDUCTION_NUMBERS[str(op)], tensor)
        reduction, factor = self._reduction(_ALL_REDUCE, op, tensor)
        algorithm = algorithm or self._algorithm
        mark, schedule = (0, None) if algorithm is None else self._compiled(algorithm)
        call = (_ALL_REDUCE, mark, reduction, factor, schedule)
        if type(tensor) in LISTS:
            return self._run_lists(call, tensor, tensor, async_op)
        return self._run(call, tensor, tensor, async_op)

    def _run_given_but_all_reduce(self, operation: int, *given: Any) -> int:
        is_all_reduce = operation == _ALL_REDUCE
        return Status.ASK_AGAIN if is_all_reduce else self._group.run_given(operation, *given)

    def fail_given(self, status: int, operation: Operation, op: str, tensors: Any) -> NoReturn:
        """Raise what a status of `run_given` stands for."""
        self._fail(status, operation, REDUCTION_NUMBERS[op], tensors)

    def exchange_integers(self, integers: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Every rank's integers, in rank order; all ranks pass equally many."""
        everyone = self._group.exchange(integers)
        if isinstance(everyone, int):
            raise self._exceptions.call_error(everyone, Operation.ALL_GATHER, 0, "uint8")
        return everyone

    def gather_ragged(
        self,
        tensor: Any,
        root: int | None,
        empty_like: Callable[[Any], Any],
        empty: Callable[[Any, int, tuple[int, ...]], Any],
    ) -> Gathered:
        """Every rank's tensor, in new tensors on `root`, or with None on every rank, if all are
        small; if not all are, every rank's dtype and shape. `empty_like(tensor)` makes such a
        tensor, and `empty(tensor, dtype, shape)` any other beside it, of the dtype with this
        number."""
        gathered = self._gather_ragged(tensor, -1 if root is None else root, empty_like, empty)
        if isinstance(gathered, tuple):
            return gathered
        operation = Operation.ALL_GATHER if root is None else Operation.GATHER
        if gathered is None:
            from unisono.comm.arguments import check_tensor

            self._checked(operation, check_tensor, tensor, False, ("cpu",))
            self._refuse(operation, "a tensor that DLPack does not show", TypeError)
        raise self._exceptions.call_error(gathered, operation, 0, "uint8")

    def _compiled(self, algorithm: str | Schedule) -> tuple[int, bytes]:
        """An algorithm's mark in posts, and what this rank does in it, for the engine."""
        from unisono.comm.compiled_schedules import compile_schedule, schedule_for
        from unisono.comm.mismatches import algorithm_mark

        try:
            schedule = schedule_for("all_reduce", algorithm, self.size)
            known = self._compiled_schedules.get(id(schedule))
            if known is None or known[0] is not schedule:
                encoded = compile_schedule(schedule, self.rank).encode()
                known = schedule, algorithm_mark(schedule.algorithm), encoded
                self._compiled_schedules[id(schedule)] = known
            return known[1:]
        except ScheduleError as error:
            kind = partial(ScheduleError, rank=error.rank, chunk=error.chunk, step=error.step)
            self._refuse(Operation.ALL_REDUCE, str(error), kind)
        except ValueError as error:
            self._refuse(Operation.ALL_REDUCE, str(error))

    def _run_by(self, algorithm: str | Schedule, *call: Any, **more: Any) -> Work | None:
        """The other collectives by an algorithm: over messages, and not in the engine."""
        from unisono.comm.by_algorithm import run_by

        return run_by(algorithm, self, *call, **more)

    def _run_reduce(
        self, tensor: Tensors, root: int, op: AnyOp, async_op: bool, algorithm: Algorithm
    ) -> Work | None:
        if algorithm is not None:
            return self._run_by(algorithm, "reduce", tensor, None, root, op, async_op)
        if type(root) is not int or not 0 <= root < self.size:
            self._check_root(_REDUCE, root)
        reduction, factor = self._reduction(_REDUCE, op, tensor)
        call = (_REDUCE, root, reduction, factor, None)
        if type(tensor) in LISTS:
            return self._run_lists(call, tensor, tensor, async_op)
        return self._run(call, tensor, tensor, async_op)

    def _run_broadcast(
        self, tensor: Tensors, root: int, async_op: bool, algorithm: Algorithm
    ) -> Work | None:
        if algorithm is not None:
            return self._run_by(algorithm, "broadcast", tensor, None, root, async_op=async_op)
        if type(root) is not int or not 0 <= root < self.size:
            self._check_root(_BROADCAST, root)
        call = (_BROADCAST, root, 0, 1.0, None)
        if type(tensor) in LISTS:
            return self._run_lists(call, tensor, tensor, async_op)
        return self._run(call, tensor, tensor, async_op)

    def _run_all_gather(
        self, output: Tensors, input: Tensors, async_op: bool, algorithm: Algorithm
    ) -> Work | None:
        if algorithm is not None:
            return self._run_by(algorithm, "all_gather", output, input, async_op=async_op)
        if type(input) in LISTS:
            return self._run_lists(_ALL_GATHER, output, input, async_op)
        return self._run(_ALL_GATHER, output, input, async_op)

    def _run_reduce_scatter(
        self, output: Tensors, input: Tensors, op: AnyOp, async_op: bool, algorithm: Algorithm
    ) -> Work | None:
        if algorithm is not None:
            return self._run_by(algorithm, "reduce_scatter", output, input, 0, op, async_op)
        reduction, factor = self._reduction(_REDUCE_SCATTER, op, output)
        call = (_REDUCE_SCATTER, 0, reduction, factor, None)
        if type(output) in LISTS:
            return self._run_lists(call, output, input, async_op)
        return self._run(call, output, input, async_op)

    def _run_gather(
        self, output: Tensors | None, input: Tensor, root: int, async_op: bool
    ) -> Work | None:
        if (
            type(root) is not int
            or (self.rank == root) is (output is None)
            or not 0 <= root < self.size
        ):
            self._check_wide_side(_GATHER, root, output, "output")
        return self._run((_GATHER, root, 0, 1.0, None), output, input, async_op)

    def _run_scatter(
        self, output: Tensor, input: Tensors | None, root: int, async_op: bool
    ) -> Work | None:
        if (
            type(root) is not int
            or (self.rank == root) is (input is None)
            or not 0 <= root < self.size
        ):
            self._check_wide_side(_SCATTER, root, input, "input")
        return self._run((_SCATTER, root, 0, 1.0, None), output, input, async_op)

    def _run_all_to_all(
        self, output: Tensors, input: Tensors, async_op: bool, algorithm: Algorithm
    ) -> Work | None:
        if algorithm is not None:
            return self._run_by(algorithm, "all_to_all", output, input, async_op=async_op)
        return self._run(_ALL_TO_ALL, output, input, async_op)


def open_with(timeout_s: float) -> Callable[[int, int, int, int], Any]:
    """How a member opens the group once it has the segment."""
    return partial(open_group, timeout_s=timeout_s)
