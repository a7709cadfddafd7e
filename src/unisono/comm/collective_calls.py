"""The collectives of a Communicator: what each rank passes, and what it has afterwards.

Methods are output-first and work in place, as torch's do. A tensor is a CPU `torch.Tensor` or a
`numpy.ndarray`, contiguous or not. `root`, and every rank in an argument, is a rank of this group.

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
from typing import TYPE_CHECKING, Literal, TypeAlias, overload

from unisono.comm.reductions import Reduction
from unisono.comm.tensors import Tensor, Tensors
from unisono.comm.work import Work

if TYPE_CHECKING:
    from unisono.plan.schedule import Schedule

Algorithm: TypeAlias = "str | Schedule | None"
No: TypeAlias = Literal[False]
Yes: TypeAlias = Literal[True]


def is_auto(algorithm: object) -> bool:
    """Whether the choice of an algorithm is left to what `unisono tune` measured; where it measured
    nothing, that is the implementation's own way."""
    return isinstance(algorithm, str) and algorithm.casefold() == "auto"


class Collectives(ABC):
    """What every Communicator can do with tensors of all its ranks.

    Each method has three signatures, so that type checkers know what it returns: None, or with
    `async_op` a Work.
    """

    @overload
    def all_reduce(
        self,
        tensor: Tensors,
        op: Reduction = "sum",
        *,
        async_op: No = False,
        algorithm: Algorithm = None,
    ) -> None: ...
    @overload
    def all_reduce(
        self, tensor: Tensors, op: Reduction = "sum", *, async_op: Yes, algorithm: Algorithm = None
    ) -> Work: ...
    @overload
    def all_reduce(
        self, tensor: Tensors, op: Reduction = "sum", *, async_op: bool, algorithm: Algorithm = None
    ) -> Work | None: ...
    @abstractmethod
    def all_reduce(
        self,
        tensor: Tensors,
        op: Reduction = "sum",
        *,
        async_op: bool = False,
        algorithm: Algorithm = None,
    ) -> Work | None:
        """Combine `tensor` over all ranks; every rank has the result, bit for bit the same. The
        tensors of a list must not share memory. `op` is "sum", "avg" ("mean"), "product", "min",
        "max", "band", "bor", "bxor" or a PremulSum; with `async_op` a Work is returned at once.

        `algorithm` names one of `unisono.plan.catalog("all_reduce")`, in any case of letters, or is
        a Schedule; None is what UNISONO_ALGO names, and if it names nothing the implementation's
        own. It must be the same on all ranks. A schedule adds in its own order: docs/execution.md.
        "auto" takes what `unisono tune` found fastest, without other bits: docs/tuning.md.

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
        self,
        tensor: Tensors,
        root: int = 0,
        op: Reduction = "sum",
        *,
        async_op: No = False,
        algorithm: Algorithm = None,
    ) -> None: ...
    @overload
    def reduce(
        self,
        tensor: Tensors,
        root: int = 0,
        op: Reduction = "sum",
        *,
        async_op: Yes,
        algorithm: Algorithm = None,
    ) -> Work: ...
    @overload
    def reduce(
        self,
        tensor: Tensors,
        root: int = 0,
        op: Reduction = "sum",
        *,
        async_op: bool,
        algorithm: Algorithm = None,
    ) -> Work | None: ...
    @abstractmethod
    def reduce(
        self,
        tensor: Tensors,
        root: int = 0,
        op: Reduction = "sum",
        *,
        async_op: bool = False,
        algorithm: Algorithm = None,
    ) -> Work | None:
        """Combine `tensor` over all ranks by `op`; `root` has the result, the others' stay
        untouched. With `async_op` a Work is returned at once.

        `algorithm`, here and below, names one of `unisono.plan.catalog` for this collective, or is
        a Schedule, the same on all ranks, or "auto"; None is the implementation's own. A named one
        runs over messages: parts of a wide side must then have one size, and `async_op` is refused.

        Raises what `all_reduce` raises, and ValueError if `root` is not a rank of the group.

        >>> x = torch.ones(2)
        >>> comm.reduce(x, root=1)
        >>> x.tolist() == ([2, 2] if comm.rank == 1 else [1, 1])
        True
        """

    @overload
    def broadcast(
        self, tensor: Tensors, root: int = 0, *, async_op: No = False, algorithm: Algorithm = None
    ) -> None: ...
    @overload
    def broadcast(
        self, tensor: Tensors, root: int = 0, *, async_op: Yes, algorithm: Algorithm = None
    ) -> Work: ...
    @overload
    def broadcast(
        self, tensor: Tensors, root: int = 0, *, async_op: bool, algorithm: Algorithm = None
    ) -> Work | None: ...
    @abstractmethod
    def broadcast(
        self, tensor: Tensors, root: int = 0, *, async_op: bool = False, algorithm: Algorithm = None
    ) -> Work | None:
        """Copy `root`'s `tensor` to every rank. With `async_op` a Work is returned at once;
        `algorithm` as in `reduce`.

        Raises ValueError if `root` is not a rank of the group.

        >>> x = torch.full((2,), comm.rank)
        >>> comm.broadcast(x, root=1)
        >>> x
        tensor([1, 1])
        """

    @overload
    def all_gather(
        self, output: Tensors, input: Tensors, *, async_op: No = False, algorithm: Algorithm = None
    ) -> None: ...
    @overload
    def all_gather(
        self, output: Tensors, input: Tensors, *, async_op: Yes, algorithm: Algorithm = None
    ) -> Work: ...
    @overload
    def all_gather(
        self, output: Tensors, input: Tensors, *, async_op: bool, algorithm: Algorithm = None
    ) -> Work | None: ...
    @abstractmethod
    def all_gather(
        self,
        output: Tensors,
        input: Tensors,
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

    @overload
    def reduce_scatter(
        self,
        output: Tensors,
        input: Tensors,
        op: Reduction = "sum",
        *,
        async_op: No = False,
        algorithm: Algorithm = None,
    ) -> None: ...
    @overload
    def reduce_scatter(
        self,
        output: Tensors,
        input: Tensors,
        op: Reduction = "sum",
        *,
        async_op: Yes,
        algorithm: Algorithm = None,
    ) -> Work: ...
    @overload
    def reduce_scatter(
        self,
        output: Tensors,
        input: Tensors,
        op: Reduction = "sum",
        *,
        async_op: bool,
        algorithm: Algorithm = None,
    ) -> Work | None: ...
    @abstractmethod
    def reduce_scatter(
        self,
        output: Tensors,
        input: Tensors,
        op: Reduction = "sum",
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

    @overload
    def gather(
        self, output: Tensors | None, input: Tensor, root: int = 0, *, async_op: No = False
    ) -> None: ...
    @overload
    def gather(
        self, output: Tensors | None, input: Tensor, root: int = 0, *, async_op: Yes
    ) -> Work: ...
    @overload
    def gather(
        self, output: Tensors | None, input: Tensor, root: int = 0, *, async_op: bool
    ) -> Work | None: ...
    @abstractmethod
    def gather(
        self, output: Tensors | None, input: Tensor, root: int = 0, *, async_op: bool = False
    ) -> Work | None:
        """`root` has all inputs, in rank order, in its wide `output`; the others pass None. Each
        passes its own `input`; with `async_op` a Work is returned at once.

        Raises ValueError if `output` does not fit, is missing on `root` or given elsewhere, or
        `root` is not a rank of the group.

        >>> everyone = torch.empty(2) if comm.rank == 0 else None
        >>> comm.gather(everyone, torch.tensor([comm.rank + 0.5]))
        >>> assert comm.rank != 0 or everyone.tolist() == [0.5, 1.5]
        """

    @overload
    def scatter(
        self, output: Tensor, input: Tensors | None, root: int = 0, *, async_op: No = False
    ) -> None: ...
    @overload
    def scatter(
        self, output: Tensor, input: Tensors | None, root: int = 0, *, async_op: Yes
    ) -> Work: ...
    @overload
    def scatter(
        self, output: Tensor, input: Tensors | None, root: int = 0, *, async_op: bool
    ) -> Work | None: ...
    @abstractmethod
    def scatter(
        self, output: Tensor, input: Tensors | None, root: int = 0, *, async_op: bool = False
    ) -> Work | None:
        """Rank r has part r of `root`'s wide `input` in `output`; the others pass None as input.
        With `async_op` a Work is returned at once.

        Raises ValueError if a part does not fit, `input` is missing on `root` or given elsewhere,
        or `root` is not a rank of the group.

        >>> mine = torch.empty(2)
        >>> comm.scatter(mine, torch.arange(4.0) if comm.rank == 0 else None)
        >>> mine - 2 * comm.rank  # [0, 1] and [2, 3]
        tensor([0., 1.])
        """

    @overload
    def all_to_all(
        self, output: Tensors, input: Tensors, *, async_op: No = False, algorithm: Algorithm = None
    ) -> None: ...
    @overload
    def all_to_all(
        self, output: Tensors, input: Tensors, *, async_op: Yes, algorithm: Algorithm = None
    ) -> Work: ...
    @overload
    def all_to_all(
        self, output: Tensors, input: Tensors, *, async_op: bool, algorithm: Algorithm = None
    ) -> Work | None: ...
    @abstractmethod
    def all_to_all(
        self,
        output: Tensors,
        input: Tensors,
        *,
        async_op: bool = False,
        algorithm: Algorithm = None,
    ) -> Work | None:
        """Part j of rank i's wide `input` is part i of rank j's wide `output`. With `async_op` a
        Work is returned at once; `algorithm` as in `reduce`.

        Raises ValueError for parts that do not fit or overlap otherwise than in place.

        >>> swapped = torch.empty(2, dtype=torch.int64)
        >>> comm.all_to_all(swapped, torch.tensor([10, 20]) + comm.rank)
        >>> swapped - 10 * comm.rank  # [10, 11] and [20, 21]
        tensor([10, 11])
        """

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
