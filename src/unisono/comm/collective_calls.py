"""The collectives of a Communicator: what each rank passes, and what it has afterwards.

Methods are output-first and work in place, as torch's do. A tensor is a CPU `torch.Tensor` or a
`numpy.ndarray`, contiguous or not. `root`, and every rank in an argument, is a rank of this group;
by torch's name it is `src` or `dst`, whichever torch has for the call, and rank 0 if none is given.
A call without its `input` is refused with the call that may have been meant.

Where a collective has a *wide* side (one part for each rank), that side is either one tensor,
cut evenly along its elements, or a list of `size` tensors, one per rank, which may differ in size
and may be empty. Where every argument is a list of tensors (`all_reduce([a, b])`,
`all_gather([wide_a, wide_b], [a, b])`), the call is *coalesced*: all of them travel together.

Autograd does not see what these methods write. Where it has saved a tensor that a call overwrites,
backward computes a wrong gradient without an error: pass a `.clone()`, or call
`torch.autograd.graph.increment_version(tensor)` after the call, and backward raises. Calls through
`torch.distributed` do that by themselves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

from unisono.comm.reductions import AnyReduction
from unisono.comm.tensors import Tensor, Tensors
from unisono.comm.work import Work
from unisono.torch_habits import one_root, refuse_input, refuse_splits

Algorithm: TypeAlias = "str | Schedule | None"
Rank: TypeAlias = "int | None"
No: TypeAlias = Literal[False]
Yes: TypeAlias = Literal[True]
_NOT_ONE = frozenset((list, tuple, type(None)))

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NotRequired, TypedDict, Unpack

    from unisono.plan.schedule import Schedule

    # Keywords of calls that return once they are over (Now), at once with a Work (Later), or one of
    # the two. By: with an algorithm. Root, or To and From: with the name that the other layer, or
    # torch, has for the root.
    NowBy = TypedDict("NowBy", {"async_op": No, "algorithm": Algorithm}, total=False)
    LaterBy = TypedDict("LaterBy", {"async_op": Yes, "algorithm": NotRequired[Algorithm]})
    MaybeBy = TypedDict("MaybeBy", {"async_op": bool, "algorithm": NotRequired[Algorithm]})
    NowTo = TypedDict("NowTo", {"async_op": No, "dst": Rank}, total=False)
    LaterTo = TypedDict("LaterTo", {"async_op": Yes, "dst": NotRequired[Rank]})
    MaybeTo = TypedDict("MaybeTo", {"async_op": bool, "dst": NotRequired[Rank]})
    NowFrom = TypedDict("NowFrom", {"async_op": No, "src": Rank}, total=False)
    LaterFrom = TypedDict("LaterFrom", {"async_op": Yes, "src": NotRequired[Rank]})
    MaybeFrom = TypedDict("MaybeFrom", {"async_op": bool, "src": NotRequired[Rank]})
    NowRoot = TypedDict("NowRoot", {"async_op": No, "root": Rank}, total=False)
    LaterRoot = TypedDict("LaterRoot", {"async_op": Yes, "root": NotRequired[Rank]})
    MaybeRoot = TypedDict("MaybeRoot", {"async_op": bool, "root": NotRequired[Rank]})

    class NowToBy(NowTo, NowBy): ...

    class LaterToBy(LaterTo, LaterBy): ...

    class MaybeToBy(MaybeTo, MaybeBy): ...


class Collectives(ABC):
    """What every Communicator can do with tensors of all its ranks.

    Each method has three signatures, so that type checkers know what it returns: None, or with
    `async_op` a Work.
    """

    @overload
    def all_reduce(
        self, tensor: Tensors, op: AnyReduction = "sum", **how: Unpack[NowBy]
    ) -> None: ...
    @overload
    def all_reduce(
        self, tensor: Tensors, op: AnyReduction = "sum", **how: Unpack[LaterBy]
    ) -> Work: ...
    @overload
    def all_reduce(
        self, tensor: Tensors, op: AnyReduction = "sum", **how: Unpack[MaybeBy]
    ) -> Work | None: ...
    @abstractmethod
    def all_reduce(
        self,
        tensor: Tensors,
        op: AnyReduction = "sum",
        *,
        async_op: bool = False,
        algorithm: Algorithm = None,
    ) -> Work | None:
        """Combine `tensor` over all ranks; every rank has the result, bit for bit the same. The
        tensors of a list must not share memory. `op` is "sum", "avg" ("mean"), "product", "min",
        "max", "band", "bor", "bxor", a PremulSum or a torch ReduceOp; with `async_op` a Work is
        returned at once.

        `algorithm` names one of `unisono.plan.catalog("all_reduce")`, in any case of letters, or is
        a Schedule; None is what UNISONO_ALGO names, and if it names nothing the implementation's
        own. It must be the same on all ranks. A schedule adds in its own order: docs/execution.md.

        Raises TypeError for an `op` that has no meaning for the dtype (the average of integers),
        ValueError for one that nobody knows, an unknown `algorithm`, or tensors that share memory.

        >>> x = torch.tensor([1.0, 2.0]) * (comm.rank + 1)
        >>> comm.all_reduce(x)
        >>> x
        tensor([3., 6.])
        >>> work = comm.all_reduce(x, "max", async_op=True)
        >>> work.wait()
        """

    @overload
    def reduce(
        self, tensor: Tensors, root: Rank = None, op: AnyReduction = "sum", **how: Unpack[NowToBy]
    ) -> None: ...
    @overload
    def reduce(
        self, tensor: Tensors, root: Rank = None, op: AnyReduction = "sum", **how: Unpack[LaterToBy]
    ) -> Work: ...
    @overload
    def reduce(
        self, tensor: Tensors, root: Rank = None, op: AnyReduction = "sum", **how: Unpack[MaybeToBy]
    ) -> Work | None: ...
    def reduce(
        self,
        tensor: Tensors,
        root: Rank = None,
        op: AnyReduction = "sum",
        *,
        dst: Rank = None,
        async_op: bool = False,
        algorithm: Algorithm = None,
    ) -> Work | None:
        """Combine `tensor` over all ranks by `op`; `root` (or `dst`) has the result, the others'
        stay untouched. With `async_op` a Work is returned at once.

        `algorithm`, here and below, names one of `unisono.plan.catalog` for this collective, or is
        a Schedule, the same on all ranks; None is the implementation's own. A named one runs over
        messages: parts of a wide side must then have one size, and `async_op` is refused.

        Raises what `all_reduce` raises, and ValueError if `root` is not a rank of the group.

        >>> x = torch.ones(2)
        >>> comm.reduce(x, root=1)
        >>> x.tolist() == ([2, 2] if comm.rank == 1 else [1, 1])
        True
        """
        if dst is not None:
            root = one_root(self, "reduce", root, dst)
        return self._run_reduce(tensor, 0 if root is None else root, op, async_op, algorithm)

    @overload
    def broadcast(
        self, tensor: Tensors, root: Rank = None, *, src: Rank = None, **how: Unpack[NowBy]
    ) -> None: ...
    @overload
    def broadcast(
        self, tensor: Tensors, root: Rank = None, *, src: Rank = None, **how: Unpack[LaterBy]
    ) -> Work: ...
    @overload
    def broadcast(
        self, tensor: Tensors, root: Rank = None, *, src: Rank = None, **how: Unpack[MaybeBy]
    ) -> Work | None: ...
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
        return self._run_broadcast(tensor, 0 if root is None else root, async_op, algorithm)

    @overload
    def all_gather(self, output: Tensors, input: Tensors, **how: Unpack[NowBy]) -> None: ...
    @overload
    def all_gather(self, output: Tensors, input: Tensors, **how: Unpack[LaterBy]) -> Work: ...
    @overload
    def all_gather(
        self, output: Tensors, input: Tensors, **how: Unpack[MaybeBy]
    ) -> Work | None: ...
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

        Raises ValueError if `output` does not fit, or shares memory with `input` elsewhere than in
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
        return self._run_all_gather(output, input, async_op, algorithm)

    @overload
    def reduce_scatter(
        self, output: Tensors, input: Tensors, op: AnyReduction = "sum", **how: Unpack[NowBy]
    ) -> None: ...
    @overload
    def reduce_scatter(
        self, output: Tensors, input: Tensors, op: AnyReduction = "sum", **how: Unpack[LaterBy]
    ) -> Work: ...
    @overload
    def reduce_scatter(
        self, output: Tensors, input: Tensors, op: AnyReduction = "sum", **how: Unpack[MaybeBy]
    ) -> Work | None: ...
    def reduce_scatter(
        self,
        output: Tensors,
        input: Tensors | None = None,
        op: AnyReduction = "sum",
        *,
        async_op: bool = False,
        algorithm: Algorithm = None,
    ) -> Work | None:
        """Combine the wide `input` over all ranks by `op`; rank r has part r of the result in
        `output`. With `async_op` a Work is returned at once; `algorithm` as in `reduce`.

        Raises what `all_reduce` raises, and ValueError if `output` does not fit.

        >>> mine = torch.empty(2)
        >>> comm.reduce_scatter(mine, torch.arange(4.0))
        >>> mine - 4 * comm.rank  # [0, 2] and [4, 6]
        tensor([0., 2.])
        """
        if input is None:
            refuse_input(self, "reduce_scatter")
        return self._run_reduce_scatter(output, input, op, async_op, algorithm)

    @overload
    def gather(
        self, output: Tensors | None, input: Tensor, root: Rank = None, **how: Unpack[NowTo]
    ) -> None: ...
    @overload
    def gather(
        self, output: Tensors | None, input: Tensor, root: Rank = None, **how: Unpack[LaterTo]
    ) -> Work: ...
    @overload
    def gather(
        self, output: Tensors | None, input: Tensor, root: Rank = None, **how: Unpack[MaybeTo]
    ) -> Work | None: ...
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
        return self._run_gather(output, input, 0 if root is None else root, async_op)

    @overload
    def scatter(
        self,
        output: Tensor,
        input: Tensors | None = None,
        root: Rank = None,
        **how: Unpack[NowFrom],
    ) -> None: ...
    @overload
    def scatter(
        self,
        output: Tensor,
        input: Tensors | None = None,
        root: Rank = None,
        **how: Unpack[LaterFrom],
    ) -> Work: ...
    @overload
    def scatter(
        self,
        output: Tensor,
        input: Tensors | None = None,
        root: Rank = None,
        **how: Unpack[MaybeFrom],
    ) -> Work | None: ...
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
        None as input, or none. With `async_op` a Work is returned at once.

        Raises ValueError if a part does not fit, `input` is missing on `root` or given elsewhere,
        or `root` is not a rank of the group.

        >>> mine = torch.empty(2)
        >>> comm.scatter(mine, torch.arange(4.0) if comm.rank == 0 else None)
        >>> mine - 2 * comm.rank  # [0, 1] and [2, 3]
        tensor([0., 1.])
        """
        if src is not None:
            root = one_root(self, "scatter", root, src)
        return self._run_scatter(output, input, 0 if root is None else root, async_op)

    @overload
    def all_to_all(self, output: Tensors, input: Tensors, **how: Unpack[NowBy]) -> None: ...
    @overload
    def all_to_all(self, output: Tensors, input: Tensors, **how: Unpack[LaterBy]) -> Work: ...
    @overload
    def all_to_all(
        self, output: Tensors, input: Tensors, **how: Unpack[MaybeBy]
    ) -> Work | None: ...
    def all_to_all(
        self,
        output: Tensors,
        input: Tensors | None = None,
        *splits: Any,
        async_op: bool = False,
        algorithm: Algorithm = None,
    ) -> Work | None:
        """Part j of rank i's wide `input` is part i of rank j's wide `output`. With `async_op` a
        Work is returned at once; `algorithm` as in `reduce`. Parts of other lengths
        are lists of tensors; torch's `splits` are refused.

        Raises ValueError for parts that do not fit or overlap otherwise than in place.

        >>> swapped = torch.empty(2, dtype=torch.int64)
        >>> comm.all_to_all(swapped, torch.tensor([10, 20]) + comm.rank)
        >>> swapped - 10 * comm.rank  # [10, 11] and [20, 21]
        tensor([10, 11])
        """
        if splits:
            refuse_splits(self)
        if input is None:
            refuse_input(self, "all_to_all")
        return self._run_all_to_all(output, input, async_op, algorithm)

    @overload
    def barrier(self, *, timeout_s: float | None = None, async_op: No = False) -> None: ...
    @overload
    def barrier(self, *, timeout_s: float | None = None, async_op: Yes) -> Work: ...
    @overload
    def barrier(self, *, timeout_s: float | None = None, async_op: bool) -> Work | None: ...
    @abstractmethod
    def barrier(self, *, timeout_s: float | None = None, async_op: bool = False) -> Work | None:
        """Return once every rank has called it. `timeout_s` is this call's own limit; with
        `async_op` a Work is returned at once.

        Raises CollectiveTimeout, with the ranks that are missing, after that time.

        >>> comm.barrier()
        """

    # What an implementation has, with the same arguments in the same order; it checks ranks and
    # tensors.
    _run_reduce: Callable[..., Work | None]
    _run_broadcast: Callable[..., Work | None]
    _run_all_gather: Callable[..., Work | None]
    _run_reduce_scatter: Callable[..., Work | None]
    _run_gather: Callable[..., Work | None]
    _run_scatter: Callable[..., Work | None]
    _run_all_to_all: Callable[..., Work | None]
