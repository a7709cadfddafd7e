"""The native make of the Communicator: ranks of this machine over shared memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from sys import _getframe as _caller
from typing import TYPE_CHECKING, Any, NoReturn

from unisono import variables
from unisono.comm.base import (
    DEFAULT_TIMEOUT_S,
    REDUCTIONS,
    TRUNCATED_AVG,
    Communicator,
    Op,
    PremulSum,
    Work,
    dtype_name,
    has_meaning,
    holds,
    name_of_dtype,
)
from unisono.comm.engine import (
    Operation,
    Status,
    engine_ns,
    open_group,
    which_overlap,
    work_types,
)
from unisono.comm.rendezvous.announcements import Announcements
from unisono.comm.rendezvous.lobby import Lobby
from unisono.comm.rendezvous.membership import JoinRequest, Membership
from unisono.comm.rendezvous.unix_socket import Deadline
from unisono.comm.rendezvous.waiting import JOIN_TIMEOUT_S
from unisono.comm.shared_memory.exceptions import GroupExceptions
from unisono.comm.shared_memory.segment_listeners import announce_segment
from unisono.comm.solo import SoloCommunicator
from unisono.comm.work import join_works
from unisono.errors import GroupError, ScheduleError

if TYPE_CHECKING:
    from unisono.comm.base import Tensor, Tensors
    from unisono.plan.schedule import Schedule

_REDUCTION_NUMBERS = {name: number for number, name in enumerate(REDUCTIONS)}
_REDUCTION_NUMBERS["mean"] = _REDUCTION_NUMBERS["avg"]
_PREMUL_SUM = len(REDUCTIONS)
_REDUCTION_NUMBERS[TRUNCATED_AVG] = _PREMUL_SUM + 1
# Looking a member up in its enumeration takes longer than a global.
_BROADCAST, _ALL_GATHER = Operation.BROADCAST, Operation.ALL_GATHER
_REDUCE_SCATTER, _ALL_TO_ALL = Operation.REDUCE_SCATTER, Operation.ALL_TO_ALL
_dtype_of = attrgetter("dtype")
for _kind in work_types():
    Work.register(_kind)
_LISTS = frozenset((list, tuple))  # asking for the type is several times faster than isinstance


class SharedMemoryCommunicator(Communicator):
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
        self._barrier = membership.group.barrier
        self._call = membership.group.run
        self._send = membership.group.send
        self._recv = membership.group.recv
        self._isend = membership.group.isend
        self._irecv = membership.group.irecv
        self._exceptions = GroupExceptions(membership, name, global_ranks)
        self._splits: dict[tuple[tuple[int, ...], str], int] = {}
        self._compiled_schedules: dict[int, tuple[Schedule, int, bytes]] = {}
        self._algorithm = variables.ALGO.read()
        if self._algorithm is not None:  # the short way knows the engine's own algorithm alone
            self._all_reduce = lambda tensor, op: Status.ASK_AGAIN
        eager_bytes = variables.EAGER_SEND.read()
        self._group.set_eager(-1 if eager_bytes is None else eager_bytes)
        keeps_sites = variables.SITES.read() or False
        global_rank = self.rank if global_ranks is None else global_ranks[self.rank]
        self._group.introduce(name, global_rank, keeps_sites)
        announce_segment(self._group.descriptor)
        self.timeout_s = timeout_s

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
        """Meet the other `size - 1` ranks through `exchange` and make a group with them. `word` is
        what the others shall know of this rank: `words` has everybody's. The meeting ends after
        `join_timeout_s`, or at a `deadline` that has begun already. `check` is called while the
        others are awaited, and raises when they will not come."""
        with Lobby() as lobby:
            deadline = deadline or Deadline(join_timeout_s)
            request = JoinRequest(name, rank, size, deadline, open_with(timeout_s), payload, check)
            membership = lobby.meet_by(announcements, request)
            return cls(membership, lobby, name, global_ranks or tuple(range(size)), timeout_s)

    @property
    def payloads(self) -> tuple[str, ...]:
        """What each rank said of itself when they met."""
        return self._membership.payloads

    # -- settings and life ---------------------------------------------------------------------

    @property
    def timeout_s(self) -> float:
        """How long a call waits for its peers."""
        return self._group.timeout_ns / 1e9

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self._group.timeout_ns = engine_ns(seconds)

    def split(self, ranks: Sequence[int], label: str = "") -> Communicator | None:
        members = self._members(ranks)
        if self.rank not in members:
            return None
        if self._lobby is None:
            raise self._exceptions.closed()
        serial = self._splits[members, label] = self._splits.get((members, label), 0) + 1
        listed = f"{label}[{','.join(map(str, members))}]"
        name = (
            (f"{self.name}." if label else self.name)
            + listed
            + (f"/{serial}" if serial > 1 else "")
        )
        parents = self.global_ranks
        global_ranks = None if parents is None else tuple(parents[rank] for rank in members)
        if len(members) == 1:
            return SoloCommunicator(name, global_ranks, self.timeout_s)
        request = JoinRequest(
            f"{self._membership.key}/{listed}/{serial}",
            members.index(self.rank),
            len(members),
            Deadline(self.timeout_s),
            open_with(self.timeout_s),
            check=self._raise_if_ended,
        )
        membership = self._lobby.meet_at(self._membership.members[members[0]].address, request)
        return SharedMemoryCommunicator(membership, self._lobby, name, global_ranks, self.timeout_s)

    def _raise_if_ended(self) -> None:
        ending = self.errored
        if ending is not None:
            raise ending

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
        return self._exceptions.failure(doing) if self._group.failure()[0] else None

    def close(self) -> None:
        lobby, self._lobby = self._lobby, None
        if lobby is not None:
            self._group.close()
            lobby.close()

    # -- collectives -----------------------------------------------------------------------------

    def barrier(self, *, timeout_s: float | None = None, async_op: bool = False) -> Work | None:
        if timeout_s is not None:
            return self._barrier_within(timeout_s, async_op)
        if async_op:
            return self._run(Operation.BARRIER, None, None, async_op=True)
        status = self._barrier()
        if status:
            self._fail(status, Operation.BARRIER)
        return None

    def _barrier_within(self, timeout_s: float, async_op: bool) -> Work | None:
        """A work takes the group's limit when it is begun: let it find its own."""
        usual_s, self.timeout_s = self.timeout_s, timeout_s
        try:
            work = self._run(Operation.BARRIER, None, None, async_op=True)
        finally:
            self.timeout_s = usual_s
        if work is not None and not async_op:
            work.wait()
            return None
        return work

    def all_reduce(
        self,
        tensor: Tensors,
        op: Op = "sum",
        *,
        async_op: bool = False,
        algorithm: str | Schedule | None = None,
    ) -> Work | None:
        if not async_op and algorithm is None:
            status = self._all_reduce(tensor, op)
            if not status:
                return None
            if status != Status.ASK_AGAIN:
                self._fail(status, Operation.ALL_REDUCE, _REDUCTION_NUMBERS[str(op)], tensor)
        reduction, factor = self._reduction(Operation.ALL_REDUCE, op, tensor)
        algorithm = algorithm or self._algorithm
        if algorithm is None:
            return self._in_place(Operation.ALL_REDUCE, tensor, 0, reduction, factor, async_op)
        return self._all_reduce_by(algorithm, tensor, reduction, factor, async_op)

    def _all_reduce_by(
        self,
        algorithm: str | Schedule,
        tensor: Any,
        reduction: int,
        factor: float,
        async_op: bool,
    ) -> Work | None:
        mark, encoded = self._compiled(algorithm)
        operation = Operation.ALL_REDUCE
        if type(tensor) not in _LISTS:
            return self._run(
                operation, tensor, tensor, mark, reduction, factor, False, async_op, encoded
            )
        return join_works(
            self._run(operation, alike, alike, mark, reduction, factor, True, async_op, encoded)
            for alike, _ in self._by_dtype(operation, tensor, tensor)
        )

    def _compiled(self, algorithm: str | Schedule) -> tuple[int, bytes]:
        """An algorithm's mark in posts, and what this rank does in it, for the engine."""
        from unisono.comm.compiled_schedules import algorithm_mark, compile_schedule, schedule_for

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

    def reduce(
        self, tensor: Tensors, root: int = 0, op: Op = "sum", *, async_op: bool = False
    ) -> Work | None:
        reduction, factor = self._reduction(Operation.REDUCE, op, tensor)
        return self._in_place(Operation.REDUCE, tensor, root, reduction, factor, async_op)

    def broadcast(self, tensor: Tensors, root: int = 0, *, async_op: bool = False) -> Work | None:
        return self._in_place(_BROADCAST, tensor, root, 0, 1.0, async_op)

    def all_gather(self, output: Tensors, input: Tensors, *, async_op: bool = False) -> Work | None:
        coalesced = type(input) in _LISTS
        return self._widening(_ALL_GATHER, output, input, coalesced, async_op=async_op)

    def reduce_scatter(
        self, output: Tensors, input: Tensors, op: Op = "sum", *, async_op: bool = False
    ) -> Work | None:
        operation = _REDUCE_SCATTER
        reduction, factor = self._reduction(operation, op, output)
        coalesced = type(output) in _LISTS
        return self._widening(operation, output, input, coalesced, reduction, factor, async_op)

    def gather(
        self, output: Tensors | None, input: Tensor, root: int = 0, *, async_op: bool = False
    ) -> Work | None:
        self._check_root(Operation.GATHER, root, output, "output")
        return self._run(Operation.GATHER, output, input, root, async_op=async_op)

    def scatter(
        self, output: Tensor, input: Tensors | None, root: int = 0, *, async_op: bool = False
    ) -> Work | None:
        self._check_root(Operation.SCATTER, root, input, "input")
        return self._run(Operation.SCATTER, output, input, root, async_op=async_op)

    def all_to_all(self, output: Tensors, input: Tensors, *, async_op: bool = False) -> Work | None:
        return self._run(_ALL_TO_ALL, output, input, 0, 0, 1.0, False, async_op)

    # -- point to point --------------------------------------------------------------------------

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        if type(dst) is not int or not 0 <= dst < self.size:
            self._refuse_peer(dst)
        status = self._send(tensor, dst, tag)
        if status < 0:
            raise self._exceptions.message_error(
                -status, (True, tensor, dst, tag), self._group.seen()
            )

    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> int:
        if src is None:
            src = -1
        elif type(src) is not int or not 0 <= src < self.size:
            self._refuse_peer(src)
        source = self._recv(tensor, src, tag)
        if source < 0:
            raise self._exceptions.message_error(
                -source, (False, tensor, src, tag), self._group.seen()
            )
        return source

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Work:
        if type(dst) is not int or not 0 <= dst < self.size:
            self._refuse_peer(dst)
        return self._isend(self._exceptions, _caller(1), tensor, dst, tag)

    def irecv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> Work:
        if src is None:
            src = -1
        elif type(src) is not int or not 0 <= src < self.size:
            self._refuse_peer(src)
        return self._irecv(self._exceptions, _caller(1), tensor, src, tag)

    def _refuse_peer(self, peer: object) -> NoReturn:
        raise ValueError(f"rank {peer!r} is not a rank of group {self.name} of {self.size}")

    # -- the way to the engine -------------------------------------------------------------------

    def _run(
        self,
        operation: Operation,
        output: Any,
        input: Any,
        root: int = 0,
        reduction: int = 0,
        factor: float = 1.0,
        coalesced: bool = False,
        async_op: bool = False,
        program: bytes | None = None,
    ) -> Work | None:
        if async_op:
            work = self._group.submit(
                self._exceptions,
                operation,
                output,
                input,
                root,
                reduction,
                factor,
                coalesced,
                program,
            )
            if isinstance(work, int):
                raise self._exceptions.call_error(work, operation)
            return work
        status = self._call(operation, output, input, root, reduction, factor, coalesced, program)
        if status:
            self._fail(status, operation, reduction, output if input is None else input)
        return None

    def _in_place(
        self,
        operation: Operation,
        tensor: Any,
        root: int,
        reduction: int,
        factor: float,
        async_op: bool,
    ) -> Work | None:
        if type(root) is not int or not 0 <= root < self.size:
            self._check_root(operation, root)
        if type(tensor) not in _LISTS:
            return self._run(operation, tensor, tensor, root, reduction, factor, async_op=async_op)
        return join_works(
            self._run(operation, alike, alike, root, reduction, factor, True, async_op)
            for alike, _ in self._by_dtype(operation, tensor, tensor)
        )

    def _widening(
        self,
        operation: Operation,
        output: Any,
        input: Any,
        coalesced: bool,
        reduction: int = 0,
        factor: float = 1.0,
        async_op: bool = False,
    ) -> Work | None:
        if not coalesced:
            return self._run(operation, output, input, 0, reduction, factor, False, async_op)
        if type(output) not in _LISTS or type(input) not in _LISTS:
            self._refuse(operation, "a coalesced call takes a list on both sides", TypeError)
        if len(output) != len(input):
            self._refuse(operation, f"{len(output)} outputs for {len(input)} inputs")
        return join_works(
            self._run(operation, outputs, inputs, 0, reduction, factor, True, async_op)
            for outputs, inputs in self._by_dtype(operation, output, input)
        )

    def _by_dtype(
        self, operation: Operation, outputs: Sequence[Any], inputs: Sequence[Any]
    ) -> list[tuple[list[Any], list[Any]]]:
        """Pairs of tensors sorted into lists of one dtype each, in order of first appearance."""
        if outputs is inputs and len(_dtypes(outputs)) == 1:  # the usual case
            return [(list(outputs), list(inputs))]
        alike: dict[str, tuple[list[Any], list[Any]]] = {}
        for output, input in zip(outputs, inputs, strict=True):
            if not hasattr(output, "dtype") or not hasattr(input, "dtype"):
                odd = input if hasattr(output, "dtype") else output
                self._refuse(operation, f"{type(odd).__name__} is no tensor", TypeError)
            pair = alike.setdefault(dtype_name(output), ([], []))
            pair[0].append(output)
            pair[1].append(input)
        if len(alike) > 1:  # the engine sees one list after the other
            together = outputs if outputs is inputs else [*outputs, *inputs]
            shared = which_overlap(together, len(outputs))
            if shared is not None:
                dtypes = " and ".join(dtype_name(together[membership]) for membership in shared)
                self._refuse(operation, f"tensors of {dtypes} share memory: pass clones")
        if not alike:
            self.barrier()  # nothing to move, but peers that have something must learn of it
        if outputs is inputs:
            return [(both, both) for both, _ in alike.values()]
        return list(alike.values())

    # -- refusing and failing --------------------------------------------------------------------

    def _reduction(self, operation: Operation, op: Op, tensors: Any) -> tuple[int, float]:
        """The engine's number of `op` and its factor; a list is checked as a whole."""
        number, factor = None, 1.0
        if isinstance(op, PremulSum):
            number, factor = _PREMUL_SUM, self._factor(operation, op, tensors)
        elif isinstance(op, str):
            number = _REDUCTION_NUMBERS.get(op)
        if number is None:
            self._refuse(
                operation, f"unknown reduction {op!r}: use {', '.join(REDUCTIONS)} or PremulSum"
            )
        if type(tensors) in _LISTS:
            name = op if isinstance(op, str) else "premul_sum"
            for dtype in map(name_of_dtype, _dtypes(tensors)):
                if not has_meaning(name, dtype):
                    self._refuse(operation, f"{name} has no meaning for {dtype}", TypeError)
        return number, factor

    def _factor(self, operation: Operation, op: PremulSum, tensors: Any) -> float:
        try:
            factor = float(op.factor)
        except (TypeError, ValueError):
            self._refuse(operation, f"the factor {op.factor!r} is no number")
        for tensor in tensors if type(tensors) in _LISTS else (tensors,):
            if not holds(dtype_name(tensor), factor):
                self._refuse(operation, f"{dtype_name(tensor)} cannot be scaled by {factor}")
        return factor

    def _check_root(
        self, operation: Operation, root: int, wide: Any = False, which: str = ""
    ) -> None:
        if not isinstance(root, int) or not 0 <= root < self.size:
            self._refuse(operation, f"root {root!r} is not a rank of a group of {self.size}")
        if wide is None and self.rank == root:
            self._refuse(operation, f"the root must pass an {which}")
        if wide is not None and wide is not False and self.rank != root:
            self._refuse(operation, f"only the root passes an {which}: pass None")

    def _refuse(
        self, operation: Operation, why: str, kind: Callable[[str], Exception] = ValueError
    ) -> NoReturn:
        """Raise about our own arguments, once the peers know that this call will not happen."""
        if self._exceptions.cause is None:
            self._group.refuse(operation)
        raise kind(f"{operation.name.lower()} on group {self.name}: {why}")

    def _fail(
        self, status: int, operation: Operation, reduction: int = 0, tensors: Any = None
    ) -> NoReturn:
        raise self._exceptions.call_error(status, operation, reduction, dtype_name(_first(tensors)))


def open_with(timeout_s: float) -> Callable[[int, int, int, int], Any]:
    """How a member opens its place once it has the segment."""
    return lambda descriptor, rank, size, nonce: open_group(
        descriptor, rank, size, nonce, timeout_s
    )


def _dtypes(tensors: Sequence[Any]) -> set[Any]:
    """Their dtypes, found without Python code for each tensor; none if something is no tensor."""
    try:
        return set(map(_dtype_of, tensors))
    except AttributeError:
        return set()


def _first(tensors: Any) -> Any:
    return tensors[0] if type(tensors) in _LISTS and tensors else tensors
