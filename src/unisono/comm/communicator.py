"""The Communicator: the one interface that moves data, on every transport."""

from __future__ import annotations

import functools
import operator
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from numbers import Integral
from sys import _getframe as _caller
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar

from unisono import variables
from unisono.comm.by_name import add_by_name
from unisono.comm.engine.numbers import REDUCTION_NUMBERS, Form, Operation, Status
from unisono.comm.forms import GivenCall, refused_by
from unisono.comm.meeting.makings import SHRINKS, making
from unisono.comm.meeting.unix_socket import Departed
from unisono.comm.reductions import FORM_SHIFT, AnyReduction, WireFormat
from unisono.comm.shared_tensors import SharedTensors
from unisono.comm.tensors import Tensor, Tensors
from unisono.comm.transport import NoFastPath, Transport, check_seconds
from unisono.comm.work import Message, Work, check_messages
from unisono.errors import (
    GroupClosed,
    GroupError,
    GroupsDiffer,
    RendezvousError,
    ScheduleError,
    UnisonoError,
)
from unisono.torch_habits import (
    ON_COMMUNICATOR,
    WithoutTorchNames,
    one_root,
    refuse_input,
    refuse_splits,
)

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed does not export it
    from torch.distributed import ProcessGroup

    from unisono.plan.schedule import Schedule

Algorithm: TypeAlias = "str | Schedule | None"
Rank: TypeAlias = "int | None"
Contributions: TypeAlias = "Sequence[Tensors] | None"
Group: TypeAlias = "Communicator | ProcessGroup | int | None"
"""What `group=` takes. torch's new_group returns a number to a process that is not in the group;
using it is refused."""
_T = TypeVar("_T")
_NOT_ONE = frozenset((list, tuple, type(None)))

# A global is faster than looking up a member of an enumeration.
_BARRIER, _ALL_REDUCE, _REDUCE = Operation.BARRIER, Operation.ALL_REDUCE, Operation.REDUCE
_BROADCAST, _ALL_GATHER = Operation.BROADCAST, Operation.ALL_GATHER
_REDUCE_SCATTER, _ALL_TO_ALL = Operation.REDUCE_SCATTER, Operation.ALL_TO_ALL
_GATHER, _SCATTER = Operation.GATHER, Operation.SCATTER
_TORCH_OPS = ("ReduceOp", "RedOpType")
_UNHEARD = (Status.ASK_AGAIN, Status.ON_DEVICE)
_PREMUL_SUM = REDUCTION_NUMBERS["premul_sum"]  # those before it are plain names to the engine


class Communicator(SharedTensors, WithoutTorchNames):
    """A group of ranks and the ways to exchange tensors among them.

    `rank` is this process in the group, `size` the number of ranks, `global_ranks` their ranks in
    the world (None if they share no world), `name` the group's name in errors and records,
    `timeout_s` how long a call waits for its peers, `backend` what moves the data, and `transport`
    the object that does so.

    Every member calls the same operations in the same order. All methods raise a `GroupError` when
    that fails, and the group is then poisoned: later calls raise the first cause again. An invalid
    argument raises ValueError or TypeError on every rank that passed it; if all members did, the
    group remains usable.

    Methods are output-first and work in place, as torch's do. A tensor is a CPU `torch.Tensor` or a
    `numpy.ndarray`, contiguous or not. `root`, and every rank in an argument, is a rank of this
    group; torch's name for it, `src` or `dst`, works too, and it is rank 0 by default. A call
    without its `input` is refused with a hint at the call that may have been meant.

    Where a collective has a *wide* side (one part for each rank), that side is either one tensor,
    cut evenly along its elements, or a list of `size` tensors, one per rank, which may differ in
    size and may be empty. Where every argument is a list of tensors (`all_reduce([a, b])`,
    `all_gather([wide_a, wide_b], [a, b])`), the call is *coalesced*: all of them move together.
    There are no split sizes: `torch.split(x, sizes)` makes the list.

    Autograd does not see what these methods write. If it has saved a tensor that a call overwrites,
    backward computes a wrong gradient without an error: pass a `.clone()`, or call
    `torch.autograd.graph.increment_version(tensor)` after the call, so that backward raises. Calls
    through `torch.distributed` do so themselves.

    With `async_op` a method returns a `Work` at once and the operation runs in the background,
    after those begun before it; do not touch its tensors until it has finished.

    >>> comm.size, comm.global_ranks, comm.name, comm.backend
    (2, (0, 1), 'world', 'unisono')
    >>> comm.next == comm.prev == 1 - comm.rank, comm.errored is None, comm.timeout_s > 0
    (True, True, True)
    """

    rank: int = -1  # set on each instance; a class value makes dir(Communicator) show it
    size: int = 0
    global_ranks: tuple[int, ...] | None = None
    name: str = ""
    transport: Transport
    _successor: weakref.ref[Communicator] | None = None
    backend: str = "unisono"
    """What moves the data: "unisono", or the torch backend of that name."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.rank = transport.rank
        self.size = transport.size
        self.name = transport.name
        self.global_ranks = transport.global_ranks
        self.backend = transport.backend
        add_by_name(self)
        self._on_device: Transport | None = None
        self._splits: Counter[tuple[tuple[int, ...], str]] = Counter()
        self._algorithm = variables.ALGO.read()
        self._exceptions = transport.exceptions
        if variables.REPRODUCIBLE.read():
            transport.reproducible = True
        fast = transport.fast_path
        self._run: Callable[..., int] = fast.run
        self._all_reduce: Callable[..., int] = fast.all_reduce
        if self._algorithm is not None:  # the fast path has only the engine's own algorithm
            self._all_reduce = NoFastPath.run
        elif self.backend == "unisono" and self.rank == 0 < self.size - 1:
            variables.mention_nccl_algo()
        self._submit: Callable[..., Any] = fast.submit
        self._barrier: Callable[[], int] = fast.barrier
        self._send: Callable[..., int] = fast.send
        self._recv: Callable[..., int] = fast.recv
        self._isend: Callable[..., Any] = fast.isend
        self._irecv: Callable[..., Any] = fast.irecv

    @staticmethod
    def join(
        name: str,
        rank: int | None = None,
        size: int | None = None,
        store: Store | None = None,
        *,
        generation: int = 0,
        timeout_s: float | None = None,
        join_timeout_s: float | None = None,
    ) -> Communicator:
        """Make a group of `size` ranks from processes that were started separately; this process is
        `rank`. They meet under a `name` that no other job of this user has at the same time.

        Ranks on several hosts also pass a torch Store that all can reach, a TCPStore or part of
        one, as `store`; on one host any Store works, or none. Early processes wait, and after 5 s
        the logger `unisono` warns which ranks are missing; a process that ends while it waits may
        be restarted. When a member of the group ends, the others' calls raise PeerLost: they close
        the group and call `join` again to meet its replacement. `global_ranks` is None.

        `timeout_s` is how long each call waits for the others, 30 minutes by default, and
        `join_timeout_s` how long the meeting may take: by default `timeout_s`, if given, or 300 s.

        Without a `size` this process joins an existing group, once its members admit it by `grow`
        under this name; as `rank`, if given. It waits for a group of at least this `generation`.

        Raises RendezvousError if the others do not join, or join with another size; if another
        process is joining as this rank; without a store, if they run on another machine or as
        another user.

        >>> import os
        >>> name = unisono.broadcast_object(f"example-{os.getpid()}")
        >>> with unisono.Communicator.join(name, rank=comm.rank, size=2) as pair:
        ...     pair.barrier()
        """
        from unisono.comm.routing import join

        for limit, s in (("timeout_s", timeout_s), ("join_timeout_s", join_timeout_s)):
            if s is not None:
                check_seconds(s, limit)
        what = f"Communicator.join({name!r}, rank={rank}, size={size})"
        with making(what, f"join {name}"):
            made = join(name, rank, size, store, generation, timeout_s, join_timeout_s)
            return Communicator(made)

    @property
    def timeout_s(self) -> float:
        """How long a call waits for its peers."""
        return self.transport.timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self.transport.timeout_s = check_seconds(seconds)

    @property
    def reproducible(self) -> bool:
        """Whether reductions are reproducible if they do not say otherwise; the same on all ranks.
        UNISONO_REPRODUCIBLE=1 makes it True at first; `split`, `shrink` and `grow` keep it.

        >>> comm.reproducible
        False
        """
        return self.transport.reproducible

    @reproducible.setter
    def reproducible(self, wanted: bool) -> None:
        self.transport.reproducible = bool(wanted)

    @property
    def next(self) -> int:
        """The rank after ours, in a ring: after the last one comes rank 0."""
        return (self.rank + 1) % self.size

    @property
    def prev(self) -> int:
        """The rank before ours, in a ring: before rank 0 comes the last one."""
        return (self.rank - 1) % self.size

    # -- collectives -----------------------------------------------------------------------------

    def all_reduce(
        self,
        tensor: Tensors,
        op: AnyReduction = "sum",
        *,
        async_op: bool = False,
        algorithm: Algorithm = None,
        reproducible: bool | None = None,
        contributions: Contributions = None,
        wire: WireFormat | None = None,
        residual: Tensor | None = None,
    ) -> Work | None:
        """Combine `tensor` over all ranks; every rank has the result, bit for bit the same. The
        tensors of a list must not share memory. `op` is "sum", "avg" ("mean"), "product", "min",
        "max", "band", "bor", "bxor", a PremulSum or a torch ReduceOp; with `async_op` a Work is
        returned at once.

        `algorithm` names one of `unisono.plan.catalog("all_reduce")`, case-insensitive, or is a
        Schedule; None means the one that UNISONO_ALGO names, or else the transport's own. It must
        be the same on all ranks. A schedule adds in its own order: docs/execution.md.

        With `reproducible` the bits depend on the contributions alone, numbered in rank order, and
        not on the number of ranks or where they run: docs/numbers.md. None is this group's default,
        `comm.reproducible`. A rank may bring several `contributions`, a list of tensors like
        `tensor`, which is then only the result; all ranks pass such lists, of any lengths.

        `wire` is how sums of large tensors cross between hosts: "int8", "fp8" or "bfloat16" instead
        of their full size, which loses digits: docs/numbers.md. With a `residual`, a float32 tensor
        of zeros at first, this rank adds what the last call lost to its contribution.

        Raises TypeError for an `op` that is not defined for the dtype (the average of integers),
        ValueError for an unknown `op` or `algorithm`, or for tensors that share memory.

        >>> x = torch.tensor([1.0, 2.0]) * (comm.rank + 1)
        >>> comm.all_reduce(x)
        >>> x
        tensor([3., 6.])
        >>> work = comm.all_reduce(x, "max", async_op=True)
        >>> work.wait()
        >>> comm.all_reduce(x, contributions=[torch.ones(2)] * (comm.rank + 1))
        >>> x
        tensor([3., 3.])
        """
        is_ordinary = reproducible is None and contributions is None
        if not is_ordinary or wire is not None or residual is not None:
            given = GivenCall(_ALL_REDUCE, tensor, tensor, 0, op, async_op, algorithm)
            return self._reduce_as(given, reproducible, contributions, wire, residual)
        if not async_op and algorithm is None:
            status: Any = self._all_reduce(tensor, op)
            if not status:
                return None
        elif algorithm is None and self._algorithm is None:
            status = self._submit(self._exceptions, _ALL_REDUCE, tensor, tensor, 0, op)
            if type(status) is not int:
                return status  # type: ignore[no-any-return]
        else:
            status = Status.ASK_AGAIN
        algorithm = self._algorithm if algorithm is None else algorithm
        given = GivenCall(_ALL_REDUCE, tensor, tensor, 0, op, async_op, algorithm)
        return self._go_on(status, given)

    def reduce(
        self,
        tensor: Tensors,
        root: Rank = None,
        op: AnyReduction = "sum",
        *,
        dst: Rank = None,
        async_op: bool = False,
        algorithm: Algorithm = None,
        reproducible: bool | None = None,
        contributions: Contributions = None,
    ) -> Work | None:
        """Combine `tensor` over all ranks by `op`; `root` (or `dst`) has the result, the other
        ranks' tensors are unchanged. With `async_op` a Work is returned at once.

        `algorithm`, here and below, names one of `unisono.plan.catalog` for this collective, or is
        a Schedule, the same on all ranks; None is the transport's own. A named one runs over
        messages: parts of a wide side must then have one size, and `async_op` is refused. (For a
        broadcast on one host it runs in the engine, as for an all_reduce.) `reproducible` and
        `contributions` as in `all_reduce`.

        Raises what `all_reduce` raises, and ValueError if `root` is not a rank of the group.

        >>> x = torch.ones(2)
        >>> comm.reduce(x, root=1)
        >>> x.tolist() == ([2, 2] if comm.rank == 1 else [1, 1])
        True
        """
        if dst is not None:
            root = one_root(self, "reduce", root, dst)
        if reproducible is not None or contributions is not None:
            root = 0 if root is None else root
            given = GivenCall(_REDUCE, tensor, tensor, root, op, async_op, algorithm)
            return self._reduce_as(given, reproducible, contributions)
        return self._call(
            _REDUCE, tensor, tensor, 0 if root is None else root, op, async_op, algorithm
        )

    def broadcast(
        self,
        tensor: Tensors,
        root: Rank = None,
        *,
        src: Rank = None,
        async_op: bool = False,
        algorithm: Algorithm = None,
    ) -> Work | None:
        """Copy the `tensor` of `root` (or `src`) to every rank. With `async_op` a Work is returned
        at once; `algorithm` as in `reduce`.

        Raises ValueError if `root` is not a rank of the group.

        >>> x = torch.full((2,), comm.rank)
        >>> comm.broadcast(x, root=1)
        >>> x
        tensor([1, 1])
        """
        if src is not None:
            root = one_root(self, "broadcast", root, src)
        return self._call(
            _BROADCAST, tensor, tensor, 0 if root is None else root, None, async_op, algorithm
        )

    def all_gather(
        self,
        output: Tensors,
        input: Tensors | None = None,
        *,
        async_op: bool = False,
        algorithm: Algorithm = None,
    ) -> Work | None:
        """Every rank has all inputs, in rank order, in its wide `output`; each passes its own
        `input`. With `async_op` a Work is returned at once; `algorithm` as in `reduce`.

        Raises ValueError if `output` does not fit, or shares memory with `input` other than in
        place.

        >>> everyone = torch.empty(2, 3)
        >>> comm.all_gather(everyone, torch.full((3,), float(comm.rank)))
        >>> everyone
        tensor([[0., 0., 0.],
                [1., 1., 1.]])
        >>> rows = [torch.empty(1), torch.empty(2)]  # of different sizes
        >>> comm.all_gather(rows, torch.ones(comm.rank + 1))
        """
        if input is None:
            refuse_input(self, "all_gather")
        return self._call(_ALL_GATHER, output, input, 0, None, async_op, algorithm)

    def reduce_scatter(
        self,
        output: Tensors,
        input: Tensors | None = None,
        op: AnyReduction = "sum",
        *,
        async_op: bool = False,
        algorithm: Algorithm = None,
        reproducible: bool | None = None,
        contributions: Contributions = None,
    ) -> Work | None:
        """Combine the wide `input` over all ranks by `op`; rank r has part r of the result in
        `output`. With `async_op` a Work is returned at once; `algorithm` as in `reduce`.
        `reproducible` as in `all_reduce`; `contributions`, a list of wide tensors (not of lists of
        parts), takes the place of `input`.

        Raises what `all_reduce` raises, and ValueError if `output` does not fit.

        >>> mine = torch.empty(2)
        >>> comm.reduce_scatter(mine, torch.arange(4.0))
        >>> mine - 4 * comm.rank  # [0, 2] and [4, 6]
        tensor([0., 2.])
        """
        if reproducible is not None or contributions is not None:
            given = GivenCall(_REDUCE_SCATTER, output, input, 0, op, async_op, algorithm)
            return self._reduce_as(given, reproducible, contributions)
        if input is None:
            refuse_input(self, "reduce_scatter")
        return self._call(_REDUCE_SCATTER, output, input, 0, op, async_op, algorithm)

    def gather(
        self,
        output: Tensors | None,
        input: Tensor | None = None,
        root: Rank = None,
        *,
        dst: Rank = None,
        async_op: bool = False,
    ) -> Work | None:
        """`root` (or `dst`) has all inputs, in rank order, in its wide `output`; the others pass
        None. Each passes its own `input`; with `async_op` a Work is returned at once.

        Raises ValueError if `output` does not fit, is missing on `root` or given elsewhere, or
        `root` is not a rank of the group.

        >>> everyone = torch.empty(2) if comm.rank == 0 else None
        >>> comm.gather(everyone, torch.tensor([comm.rank + 0.5]))
        >>> assert comm.rank != 0 or everyone.tolist() == [0.5, 1.5]
        """
        if dst is not None:
            root = one_root(self, "gather", root, dst)
        if type(input) in _NOT_ONE:
            refuse_input(self, "gather", input)
        return self._call(_GATHER, output, input, 0 if root is None else root, None, async_op)

    def scatter(
        self,
        output: Tensor,
        input: Tensors | None = None,
        root: Rank = None,
        *,
        src: Rank = None,
        async_op: bool = False,
    ) -> Work | None:
        """Rank r has part r of the wide `input` of `root` (or `src`) in `output`; the others pass
        None as input, or omit it. With `async_op` a Work is returned at once.

        Raises ValueError if a part does not fit, `input` is missing on `root` or given elsewhere,
        or `root` is not a rank of the group.

        >>> mine = torch.empty(2)
        >>> comm.scatter(mine, torch.arange(4.0) if comm.rank == 0 else None)
        >>> mine - 2 * comm.rank  # [0, 1] and [2, 3]
        tensor([0., 1.])
        """
        if src is not None:
            root = one_root(self, "scatter", root, src)
        return self._call(_SCATTER, output, input, 0 if root is None else root, None, async_op)

    def all_to_all(
        self,
        output: Tensors,
        input: Tensors | None = None,
        *splits: object,
        async_op: bool = False,
        algorithm: Algorithm = None,
    ) -> Work | None:
        """Part j of rank i's wide `input` is part i of rank j's wide `output`. With `async_op` a
        Work is returned at once; `algorithm` as in `reduce`. For parts of different lengths pass
        lists of tensors; torch's `splits` are refused.

        Raises ValueError for parts that do not fit, or overlap other than in place.

        >>> swapped = torch.empty(2, dtype=torch.int64)
        >>> comm.all_to_all(swapped, torch.tensor([10, 20]) + comm.rank)
        >>> swapped - 10 * comm.rank  # [10, 11] and [20, 21]
        tensor([10, 11])
        """
        if splits:
            refuse_splits(self)
        if input is None:
            refuse_input(self, "all_to_all")
        return self._call(_ALL_TO_ALL, output, input, 0, None, async_op, algorithm)

    def barrier(self, *, timeout_s: float | None = None, async_op: bool = False) -> Work | None:
        """Return once every rank has called it. `timeout_s` is this call's own limit; with
        `async_op` a Work is returned at once.

        Raises CollectiveTimeout, with the missing ranks, after that time.

        >>> comm.barrier()
        """
        if timeout_s is None and not async_op:
            status = self._barrier()
            if not status:
                return None
            if status not in _UNHEARD:
                raise self.transport.call_error(status, _BARRIER, None, None)
        self._raise_if_ended("barrier")
        if timeout_s is not None:
            self._checked("barrier", check_seconds, timeout_s)
        return self.transport.barrier(timeout_s, async_op)

    def _call(
        self,
        operation: Operation,
        output: Any,
        input: Any,
        root: Any,
        op: Any,
        async_op: bool,
        algorithm: Algorithm = None,
    ) -> Work | None:
        status: Any = Status.ASK_AGAIN
        if algorithm is not None:
            if not async_op and not self.reproducible:
                status = self.transport.run_again(operation, output, input, root, op, algorithm)
                if not status:
                    return None
        elif async_op:
            status = self._submit(self._exceptions, operation, output, input, root, op)
            if type(status) is not int:
                return status  # type: ignore[no-any-return]
        else:
            status = self._run(operation, output, input, root, op)
            if not status:
                return None
        given = GivenCall(operation, output, input, root, op, async_op, algorithm)
        return self._go_on(status, given)

    def _go_on(self, status: int, given: GivenCall) -> Work | None:
        """The general path of a call that the fast path has failed, or has not begun."""
        name = given.operation.name.lower()
        is_plain = not given.async_op and given.algorithm is None
        if is_plain and status == Status.ASK_AGAIN and type(given.op).__name__ in _TORCH_OPS:
            from unisono.comm.reductions import known_reduction

            known = self._checked(name, known_reduction, given.op)
            if isinstance(known, str):  # known to the engine
                status = self._run(*given[:4], known)
                if not status:
                    return None
        if status not in _UNHEARD:
            tensors = given.output if given.input is None else given.input
            raise self.transport.call_error(status, given.operation, given.op, tensors)
        on_device = self._on_device if is_plain and status == Status.ON_DEVICE else None
        if self.reproducible and given.op is not None:
            return self._reduce_as(given, True, None)
        if on_device and not on_device.run_fast(given.operation, given.output, given.op):
            return None
        self._raise_if_ended(name)
        transport = self._transport_for(name, given.output, given.input)
        is_default = given.algorithm is self._algorithm  # UNISONO_ALGO, which is for CPU tensors
        if given.algorithm is not None and not (is_default and transport is not self.transport):
            from unisono.comm.schedules.execute import run_by

            return run_by(self, transport, given)
        from unisono.comm.arguments import check_call  # many programs never need it

        call = self._checked(name, check_call, *given[:5], transport)
        return transport.run(call, given.async_op)

    def _reduce_as(
        self,
        given: GivenCall,
        reproducible: bool | None,
        contributions: Contributions,
        wire: WireFormat | None = None,
        residual: Any = None,
    ) -> Work | None:
        """A reduction that says whether it is reproducible, lists its contributions, or has a wire
        format."""
        name = given.operation.name.lower()
        listed = contributions is not None
        is_plain = not (listed or wire or given.async_op or given.algorithm or residual is not None)
        if is_plain and type(given.op) is str and given.input is not None:  # the fast path
            form = Form.REPRODUCIBLE if reproducible else 0
            number = REDUCTION_NUMBERS.get(given.op, _PREMUL_SUM)
            if number < _PREMUL_SUM:
                status = self._run(*given[:4], number | form << FORM_SHIFT, 1.0)
                if not status:
                    return None
                if status not in _UNHEARD:
                    raise self.transport.call_error(status, given.operation, given.op, given.input)
        self._raise_if_ended(name)
        as_tree = listed or (self.reproducible if reproducible is None else bool(reproducible))
        if reproducible is False and listed:
            self._refuse(name, ValueError("contributions= makes a reduction reproducible"))
        if listed and given.input is not None and given.input is not given.output:
            self._refuse(name, ValueError("pass an input or contributions=, not both"))
        if not listed and given.input is None:
            refuse_input(self, name)
        if as_tree and given.algorithm is not None:
            why = (
                "an algorithm adds in its own order, which is not reproducible: pass one of the two"
            )
            self._refuse(name, ValueError(why))
        if wire is not None and (as_tree or given.algorithm is not None):
            why = "a wire format rounds sums host by host: it excludes reproducible and algorithm"
            self._refuse(name, ValueError(why))
        if given.algorithm is not None:
            return self._go_on(Status.ASK_AGAIN, given)
        from unisono.comm.arguments import check_call

        source = contributions if listed else given.input
        transport = self._transport_for(name, given.output, source)
        more = as_tree, contributions, wire, residual
        call = self._checked(name, check_call, *given[:5], transport, *more)
        if residual is not None:
            given.output[...] += residual
            residual[...] = 0
        return transport.run(call, given.async_op)

    def _transport_for(self, operation: str, output: Any, input: Any) -> Transport:
        """The transport for collectives on the device of these tensors."""
        from unisono.comm.tensors import gpu_of

        transport = self.transport
        if "cuda" in transport.devices:
            return transport
        sides = [output] if output is input else [output, input]
        device = self._checked(operation, gpu_of, sides, 3)
        if device is None:
            return transport
        if self._on_device is None:
            from unisono.comm.routing import transport_on_gpu

            self._on_device = self._checked(
                operation, transport_on_gpu, transport, device, operation
            )
        return self._on_device or transport

    # -- messages --------------------------------------------------------------------------------

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        """Send `tensor` to rank `dst` with a `tag`; returns once a receiver has matched it, at
        every size.

        Raises MessageMismatch if the receive has another dtype or size, DeadlockError if ranks wait
        for each other in a cycle, ValueError if `dst` is not a rank of the group.

        >>> if comm.rank == 0:
        ...     comm.send(torch.ones(2), dst=1)
        ... else:
        ...     sender = comm.recv(torch.empty(2), src=0)
        """
        status = self._send(tensor, dst, tag)
        if status < 0:
            tensor = self._check_message(-status, True, tensor, dst, tag)
            self.transport.send(tensor, dst, tag)

    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> int:
        """Receive into `tensor` the first message with that `tag` from rank `src`, or from any
        rank; returns the rank that sent it.

        Raises MessageMismatch if the message has another dtype or size, DeadlockError if ranks wait
        for each other in a cycle, ValueError if `src` is not a rank of the group.

        >>> work = comm.isend(torch.ones(2), comm.next)
        >>> x = torch.empty(2)
        >>> comm.recv(x) == comm.prev
        True
        >>> work.wait()
        """
        source = self._recv(tensor, src, tag)
        if source >= 0:
            return source
        room = self._check_message(-source, False, tensor, src, tag)
        source = self.transport.recv(room, src, tag)
        if room is not tensor:
            from unisono.comm.cuda.staged_messages import deliver

            deliver(tensor, room)
        return source

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Work:
        """Like `send` of `tensor` to `dst` with a `tag`, but returns at once. Raises ValueError if
        `dst` is not a rank of the group; the work's `wait()` raises later errors.

        >>> work = comm.isend(torch.ones(2), comm.next)
        >>> comm.recv(torch.empty(2)) == comm.prev
        True
        >>> work.wait()
        """
        work = self._isend(self._exceptions, _caller(1), tensor, dst, tag)
        if type(work) is int:
            tensor = self._check_message(work, True, tensor, dst, tag)
            work = self.transport.isend(tensor, dst, tag)
        return work  # type: ignore[no-any-return]

    def irecv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> Work:
        """Like `recv` into `tensor` from `src` with a `tag`, but returns at once; the work's
        `source_rank()` is the rank that sent it. Raises ValueError if `src` is not a rank of the
        group; the work's `wait()` raises later errors.

        >>> x = torch.empty(2)
        >>> work = comm.irecv(x, src=comm.prev)
        >>> comm.send(torch.ones(2), dst=comm.next)
        >>> work.wait()
        >>> x
        tensor([1., 1.])
        """
        work = self._irecv(self._exceptions, _caller(1), tensor, src, tag)
        if type(work) is int:
            room = self._check_message(work, False, tensor, src, tag)
            work = self.transport.irecv(room, src, tag)
            if room is not tensor:
                from unisono.comm.cuda.staged_messages import ArrivingWork

                work = ArrivingWork(work, tensor, room)
        return work  # type: ignore[no-any-return]

    def batch_isend_irecv(self, messages: Sequence[Message]) -> list[Work]:
        """Start many `messages` together and return a work for each. They cannot block each other,
        whatever their order. Raises ValueError if a peer is not a rank of the group.

        >>> x = torch.empty(1)
        >>> send = unisono.Message("send", torch.ones(1), comm.next)
        >>> for work in comm.batch_isend_irecv([send, unisono.Message("recv", x, comm.prev)]):
        ...     work.wait()
        >>> x
        tensor([1.])
        """
        checked = check_messages(messages)

        def begin() -> list[Work]:
            return [
                self.isend(message.tensor, message.peer, message.tag)
                if message.kind == "send"
                else self.irecv(message.tensor, message.peer, message.tag)
                for message in checked
            ]

        return self.transport.batch([message.tensor for message in checked], begin)

    def _check_message(self, status: int, sends: bool, tensor: Any, peer: Any, tag: Any) -> Any:
        """What the transport sends or fills for a message that the fast path has not begun: the
        tensor itself or, for a GPU tensor, host memory."""
        if status not in _UNHEARD:
            peer = -1 if peer is None else peer
            raise self.transport.message_error(status, sends, peer, tag)
        from unisono.comm.arguments import check_message
        from unisono.comm.tensors import gpu_of

        what = "send" if sends else "recv"
        self._raise_if_ended(what)
        devices = self.transport.devices
        is_staged = "cuda" not in devices and gpu_of(tensor) is not None
        try:
            check_message(
                tensor, sends, peer, tag, self.transport, ("cuda",) if is_staged else devices
            )
        except (TypeError, ValueError) as error:
            self._refuse_message(what, error, peer, tag)
        if not is_staged:
            return tensor
        from unisono.comm.cuda.staged_messages import fetch, make_room

        return fetch(tensor) if sends else make_room(tensor)

    def _refuse_message(self, what: str, why: Exception, peer: Any, tag: Any) -> NoReturn:
        """Tell the peer, if it is known, that this message will not come, then raise."""
        error = self._worded(what, why)
        transport = self.transport
        is_known = type(peer) is int and 0 <= peer < self.size
        is_known = is_known or (peer is None and what == "recv")
        is_known = is_known and type(tag) is int and tag in transport.tags
        if is_known and transport.ending(what) is None:
            transport.refuse_message(what == "send", peer, tag, str(error))
        raise error from None

    # -- groups ----------------------------------------------------------------------------------

    def split(self, ranks: Sequence[int], label: str = "") -> Communicator | None:
        """Make a group of these `ranks` of this group, numbered in the given order.

        Only members take part; a rank that is not in `ranks` gets None at once and need not call.
        Groups of the same members differ by the order in which they are made, or by a `label`,
        which is part of the group's name: groups with different labels never mix.

        Raises ValueError for ranks that are not in this group, or twice in the new one; PeerLost,
        with its rank in this group, as soon as a member has died; RendezvousError if one does not
        join in time, or if members wait for each other in calls that make different groups. On one
        host, survivors can still split a group that a death has ended.

        >>> turned = comm.split([1, 0], label="turned")
        >>> turned.rank == 1 - comm.rank
        True
        >>> comm.split([0]) is None or comm.rank == 0
        True
        """
        members = self._members(ranks)
        if self.rank not in members:
            self.transport.leave_out(members)
            return None
        name = self._name_split(members, label)
        what = f"split({list(members)}{f', label={label!r}' if label else ''}) of group {self.name}"
        try:
            with making(what, f"split {name}", self.transport, members):
                return self._continued_by(self.transport.split(members, name))
        except RendezvousError as error:
            is_whole = self.transport.is_on_one_host and not isinstance(error, Departed)
            if is_whole or isinstance(error, GroupsDiffer):  # no member has it: the name is free
                self._splits[members, label] -= 1
            raise

    def _members(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """The members of a new group; ValueError unless they are ranks of this one."""
        try:
            members = tuple(map(operator.index, ranks))
        except TypeError:
            raise TypeError(
                f"split takes the ranks of the new group, not {ranks!r}: use comm.split([0, 1]) or "
                'comm.split([0, 1], label="tp"); ProcessGroupManager makes groups along axes'
            ) from None
        if not members or len(set(members)) != len(members):
            raise ValueError(f"a group needs at least one rank, and no rank twice: {members}")
        if min(members) < 0 or max(members) >= self.size:
            known = self.global_ranks
            hint = ""
            if known and set(members) <= set(known):
                meant = [known.index(member) for member in members]
                hint = f": these are global ranks; within this group they are {meant}"
            raise ValueError(f"not all of {members} are ranks of a group of {self.size}{hint}")
        return members

    def _name_split(self, members: tuple[int, ...], label: str) -> str:
        """The name of a new group of these members: the same on all of them, and new each time."""
        self._splits[members, label] += 1
        serial = self._splits[members, label]
        dot = "." if label else ""
        more = f"/{serial}" if serial > 1 else ""
        return f"{self.name}{dot}{label}[{','.join(map(str, members))}]{more}"

    def shrink(
        self,
        *,
        at_least: int = 1,
        timeout_s: float | None = None,
        store: Store | None = None,
    ) -> Communicator:
        """After a death, make a group of the remaining ranks, numbered in their old order, with the
        same settings. All survivors call it; each gets the same group, or the same exception.

        Every call and work still running on this group raises on every rank; so ranks that did not
        know of the death learn of it. Ranks that die or close the group meanwhile are left out. So
        is one that does not call within `timeout_s`, by default this group's own limit, and after 5
        s one whose process is stopped. This group and its shared tensors stay until it is closed or
        dropped. Threads that call at the same time get the same group.

        On several hosts the ranks agree through the torch Store in which they met, or, if it is
        lost, through one that the first of them hosts; or through `store`, which all of them pass.
        If a host does not answer, only a strict majority of the ranks that may be alive continues,
        unless a `store` is passed: then the ranks that reach it do.

        Raises NoQuorum on all ranks if fewer than `at_least` are left, and on a rank that called
        too late, after the others formed the new group. On several hosts also if no majority is
        left, or the store cannot be reached.

        >>> pair = comm.split([0, 1])
        >>> pair.abort("an example")
        >>> left = pair.shrink()
        >>> left.size, left.generation
        (2, 1)
        """
        limit_s = self._limit_s(timeout_s)
        if not _is_count(at_least):
            raise ValueError(f"at_least={at_least!r} is not a number of ranks")
        with self.__dict__.setdefault("_shrinking", threading.Lock()):
            if self._successor is not None:
                made = self._successor()
                if made is None:
                    text = f"{self._next_name()}, which was dropped: keep what shrink() returns"
                    raise GroupClosed(f"group {self.name} continued as {text}", group=self.name)
                return made
            following = self._next_name(), int(at_least), limit_s, store
            cause = self.errored
            recovers = cause is not None and getattr(cause, "reason", "") != SHRINKS
            call = f"shrink() of group {self.name}", f"shrink {self.name}", self.transport
            with making(*call, range(self.size), recovers):
                made = self._continued_by(self.transport.shrink(*following))
            self._successor = weakref.ref(made)
            return made

    def grow(
        self,
        name: str,
        count: int = 1,
        *,
        store: Store | None = None,
        timeout_s: float | None = None,
    ) -> Communicator:
        """Admit `count` new processes, which wait under `name` in `Communicator.join(name)`: make a
        group of all, in which the members keep their order. A newcomer that joined with a `rank`
        gets it, for instance that of a dead rank; others come last. All members call it, between
        two steps, say. This group stays as it is.

        `store` is the torch Store that the newcomers pass, if any. A TCPStore, or part of one, lets
        them join from any host, and a group on several hosts needs it. Members wait up to
        `timeout_s`, by default this group's own limit.

        Raises RendezvousError, on all members, if the newcomers do not join or one leaves while the
        group is made; this group remains usable. Raises PeerLost if a member dies.

        >>> import subprocess, sys, os
        >>> name = unisono.broadcast_object(f"grows-{os.getpid()}")
        >>> if comm.rank == 0:
        ...     code = f"import unisono; unisono.Communicator.join({name!r}).barrier()"
        ...     newcomer = subprocess.Popen([sys.executable, "-c", code])
        >>> with comm.grow(name) as three:
        ...     three.barrier()
        ...     three.size, three.name, three.generation
        (3, 'world~1', 1)
        >>> if comm.rank == 0:
        ...     assert newcomer.wait() == 0
        """
        from unisono.comm.hosts.growing import grow
        from unisono.comm.routing import check_name

        limit_s = self._limit_s(timeout_s)
        if not _is_count(count):
            raise ValueError(f"count={count!r} is not a number of new processes")
        check_name(name)
        following = self._next_name(), self.generation + 1, name, int(count), store, limit_s
        return self._continued_by(grow(self.transport, *following))

    def _continued_by(self, transport: Transport) -> Communicator:
        """A Communicator with the settings of this one."""
        made = Communicator(transport)
        made.reproducible = self.reproducible
        return made

    @property
    def generation(self) -> int:
        """How often this group has shrunk or grown since its first members met.

        >>> comm.generation
        0
        """
        base, _, number = self.name.rpartition("~")
        return int(number) if base and number.isdigit() else 0

    def _limit_s(self, timeout_s: float | None) -> float:
        return self.timeout_s if timeout_s is None else check_seconds(timeout_s)

    def _next_name(self) -> str:
        """The name of the group that this one shrinks to or grows into."""
        base = self.name.rpartition("~")[0] if self.generation else self.name
        return f"{base}~{self.generation + 1}"

    # -- refusing, failing and ending --------------------------------------------------------------

    def reject_call(self, operation: str, why: str) -> NoReturn:
        """Refuse this rank's arguments of a collective, the `operation`: tell its peers that it
        will not take part, then raise ValueError with the reason `why`.

        Raises ValueError in any case. If all ranks refuse the same call, the group remains usable;
        otherwise the others raise CollectiveMismatch.

        >>> comm.reject_call("all_reduce", "three is too many")
        Traceback (most recent call last):
            ...
        ValueError: ...three is too many...
        """
        if operation.upper() not in Operation.__members__:
            raise ValueError(f"{operation!r} is not a collective")
        self._raise_if_ended(operation)
        self._refuse(operation, ValueError(why))

    def _checked(self, operation: str, check: Callable[..., _T], *arguments: Any) -> _T:
        """The result of a check of `arguments`; if it fails, refuse the call."""
        try:
            return check(*arguments)
        except (ValueError, TypeError) as error:
            self._refuse(operation, error)
        except UnisonoError:
            raise
        except Exception as error:  # from an object that cannot even be inspected
            self.transport.refuse(operation, f"{type(error).__name__}: {error}")
            raise

    def _refuse(self, operation: str, why: Exception) -> NoReturn:
        """Tell the peers that this call will not happen, then raise about our own arguments."""
        error = self._worded(operation, why)
        self.transport.refuse(operation, str(error).partition(": ")[2])
        raise error from None

    def _refuse_for(self, operation: str, why: Exception) -> NoReturn:
        """As `reject_call`, with an exception of another type; a ScheduleError keeps its text."""
        self._raise_if_ended(operation)
        if not isinstance(why, ScheduleError):
            self._refuse(operation, why)
        self.transport.refuse(operation, str(why))
        raise why from None

    def _worded(self, operation: str, why: Exception) -> Exception:
        """The same exception with the group in its text: "all_reduce on group world: ..."."""
        from unisono.comm.arguments import NotARank

        text = why.among(self.global_ranks) if isinstance(why, NotARank) else str(why)
        kind = ValueError if isinstance(why, NotARank) else type(why)
        return kind(f"{operation} on group {self.name}: {text}")

    def _raise_if_ended(self, doing: str) -> None:
        error = self.transport.ending(doing)
        if error is not None:
            raise error

    def abort(self, reason: str = "") -> None:
        """End the group, from any rank or thread: all members' running and later calls raise
        `GroupAborted` with the `reason`. Raises nothing.

        >>> pair = comm.split([0, 1])
        >>> pair.abort("the loss is NaN")
        >>> pair.barrier()
        Traceback (most recent call last):
            ...
        unisono.errors.GroupAborted: ...the loss is NaN...
        """
        self.transport.abort(reason)

    def decide(self, serial: int, value: int) -> int:
        """Propose a `value` under this `serial` and return the first one proposed, the same on
        every rank. It never waits, and also works in a group that has ended: a decision outlives
        its rank. Serials start at 1 and increase with every decision of a group; values start at 0,
        and both are below 2**32.

        Raises ValueError for other numbers, StoreGone if decisions are kept in a torch Store that
        does not answer.

        >>> with comm.split([0, 1], label="decides") as pair:
        ...     pair.decide(1, 7)
        7
        """
        if not (0 < serial < 2**32 and 0 <= value < 2**32):
            raise ValueError(
                f"decision {serial} of {value}: serials start at 1, both are below 2**32"
            )
        return self.transport.decide(serial, value)

    @property
    def errored(self) -> GroupError | None:
        """Why the group ended: what its calls raise from now on; None while the group works."""
        return self.transport.ending("no call")

    def close(self) -> None:
        """Release everything, once works and messages that every member has begun have finished.
        Others are cancelled after 1 s: their `wait` says which ranks never joined. Closing twice
        does nothing; calls raise GroupClosed from now on, and PeerLost on peers that still need it.

        >>> pair = comm.split([0, 1])
        >>> pair.close()
        """
        on_device, self._on_device = self._on_device, None
        if on_device is not None:
            on_device.close()
        self.transport.close()

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in ON_COMMUNICATOR]

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} rank {self.rank} of {self.size}>"


def _is_count(number: Any) -> bool:
    return isinstance(number, Integral) and int(number) > 0


def _refuse_form(why: str, given: tuple[Any, ...], named: dict[str, Any], name: str) -> NoReturn:
    """Answer a call of a method in the wrong form."""
    comm: Communicator = given[0]
    error = TypeError(why)
    operation = {"empty": "allocate", "zeros": "allocate"}.get(name, name.removeprefix("i"))
    if operation == "batch_isend_irecv":  # its peers are not known
        raise comm._worded(operation, error)
    if operation not in ("send", "recv"):
        comm._refuse_for(operation, error)
    peer = named.get("dst" if operation == "send" else "src", given[2] if len(given) > 2 else None)
    tag = named.get("tag", given[3] if len(given) > 3 else 0)
    comm._refuse_message(operation, error, peer, tag)


_FORMS = "all_reduce reduce broadcast all_gather reduce_scatter gather scatter all_to_all barrier "
_FORMS += "send recv isend irecv batch_isend_irecv empty zeros"
for _name in _FORMS.split():
    _refuse = functools.partial(_refuse_form, name=_name)
    setattr(Communicator, _name, refused_by(_refuse, "comm")(getattr(Communicator, _name)))
