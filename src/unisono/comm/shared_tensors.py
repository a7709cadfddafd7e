"""Shared tensors of a Communicator: ordinary tensors in memory that all its ranks map.

`Memory` is one allocation of the group, with a part for each rank. If the ranks share no memory
there is none, and tensors are ordinary ones: programs run the same everywhere, except for
`get_peer_tensor`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar, overload

from unisono.comm.tensors import address_of

if TYPE_CHECKING:
    import torch
    from numpy.typing import DTypeLike

    from unisono.comm.engine.group_types import Block
    from unisono.comm.tensors import Array, Tensor
    from unisono.comm.transport import Transport

Shape: TypeAlias = "int | Sequence[int]"
TensorT = TypeVar("TensorT", bound="Tensor")


class Memory:
    """One allocation of a group, a block of the engine: a part for each rank, all of which this
    process can access. Tensors keep the block alive, not this object; it is freed when no rank
    has a tensor there any more."""

    def __init__(self, block: Block) -> None:
        self._block = block

    def tensor(
        self, rank: int, offset: int, shape: Sequence[int], dtype: Any, strides: Any = None
    ) -> Tensor:
        """A tensor, or with a NumPy dtype an array, `offset` bytes into the part of a rank;
        `strides` in the units of the same library. ValueError: it does not fit."""
        start, size = self._block.part(rank)
        if not size:
            raise ValueError(f"rank {rank} has nothing in this memory")
        if _is_of_torch(dtype):
            import torch

            part = torch.frombuffer(self._block, dtype=torch.uint8, count=size, offset=start)
            if strides is None:
                strides = torch.empty(shape, dtype=dtype, device="meta").stride()
            _check_fits(rank, offset, shape, [s * dtype.itemsize for s in strides], dtype, size)
            storage, first = part.untyped_storage(), offset // dtype.itemsize
            view = torch.empty(0, dtype=dtype)
            return view.set_(storage, first, tuple(shape), tuple(strides))
        import numpy

        array_part = numpy.frombuffer(memoryview(self._block), numpy.uint8, size, start)
        if strides is not None:
            _check_fits(rank, offset, shape, strides, dtype, size)
        return numpy.ndarray(tuple(shape), dtype, array_part, offset, strides)

    def find(self, address: int, ranks: int) -> int | None:
        """The offset of an address into its rank's part; None: it is in none."""
        for rank in range(ranks):
            start, size = self._block.part(rank)
            if 0 <= address - self._block.address - start < size:
                return address - self._block.address - start
        return None


def _check_fits(
    rank: int, offset: int, shape: Sequence[int], strides: Sequence[int], dtype: Any, size: int
) -> None:
    if 0 in shape:
        return
    steps = [(length - 1) * stride for length, stride in zip(shape, strides, strict=True)]
    first = offset + sum(step for step in steps if step < 0)
    end = offset + sum(step for step in steps if step > 0) + dtype.itemsize
    if first < 0 or end > size or offset % dtype.itemsize:
        raise ValueError(f"rank {rank} has only {size} bytes in this memory, and no counterpart")


class SharedTensors:
    """What every Communicator can do with memory that its ranks share."""

    rank: int
    size: int
    name: str
    transport: Transport

    @overload
    def empty(self, shape: Shape, dtype: torch.dtype | None = None) -> torch.Tensor: ...
    @overload
    def empty(self, shape: Shape, dtype: DTypeLike) -> Array: ...
    def empty(self, shape: Shape, dtype: Any = None) -> Any:
        """Make an uninitialized tensor of this `shape`, an integer or several, in memory that every
        rank of the group maps. All ranks call it. `dtype` is torch's, or NumPy's for an array; None
        is torch's default.

        It is an ordinary tensor. Calls to which every rank passes such tensors, whole or as
        contiguous slices, move large ones with one copy fewer (docs/shared.md). `get_peer_tensor`
        returns another rank's. The memory is freed when all ranks have dropped their tensors. If
        the ranks share no memory, on several hosts or over torch, the tensor is in this rank's own
        memory.

        Raises ValueError or TypeError for an invalid shape or dtype, SegmentError on all ranks if
        the memory limits of one leave no room.

        >>> x = comm.empty((2, 3), torch.float32).fill_(comm.rank)
        >>> comm.all_reduce(x)
        >>> x[0]
        tensor([1., 1., 1.])
        """
        lengths, kind = self._checked_shape(shape, dtype)
        memory = self.transport.allocate(math.prod(lengths) * kind.itemsize)
        if memory is None or not math.prod(lengths):
            return _ordinary(lengths, kind)
        return memory.tensor(self.rank, 0, lengths, kind)

    @overload
    def zeros(self, shape: Shape, dtype: torch.dtype | None = None) -> torch.Tensor: ...
    @overload
    def zeros(self, shape: Shape, dtype: DTypeLike) -> Array: ...
    def zeros(self, shape: Shape, dtype: Any = None) -> Any:
        """Like `empty` of this `shape` and `dtype`, filled with zeros. Raises what that raises.

        >>> comm.zeros(2)
        tensor([0., 0.])
        """
        made: Any = self.empty(shape, dtype)
        made[...] = 0  # new shared memory is zeroed, but ordinary memory is not
        return made

    def get_peer_tensor(self, tensor: TensorT, rank: int) -> TensorT:
        """A view of rank `rank`'s counterpart of `tensor`, which all ranks made in the same call:
        the same shape, over the peer's own elements. `tensor` comes from `empty` or `zeros`, or is
        a slice of one. This is not a collective call: no other rank takes part; use `barrier` to
        wait until a peer has written.

        Raises ValueError for a tensor that is not shared, or that has no counterpart.

        >>> x = comm.zeros(3).fill_(comm.rank)
        >>> comm.barrier()
        >>> comm.get_peer_tensor(x, 1)[1:]
        tensor([1., 1.])
        >>> comm.barrier()  # before any rank changes its own again
        """
        if type(rank) is not int or not 0 <= rank < self.size:
            raise ValueError(f"get_peer_tensor on group {self.name}: it has no rank {rank!r}")
        found = self.transport.find_memory(address_of(tensor))
        if found is None:
            if rank == self.rank:
                return tensor
            raise ValueError(
                f"get_peer_tensor on group {self.name}: this tensor is not in memory that the "
                "group shares: make it with empty or zeros of this group, or with "
                "unisono.share_tensor"
            )
        memory, offset = found
        given: Any = tensor
        strides = given.stride() if hasattr(given, "stride") else given.strides
        view: Any = memory.tensor(rank, offset, tuple(tensor.shape), tensor.dtype, strides)
        mine: TensorT = view
        return mine

    def is_shared(self, tensor: Tensor) -> bool:
        """Whether `tensor` is in memory that this group shares. Raises TypeError if it is not a
        tensor.

        >>> comm.is_shared(comm.zeros(3)), comm.is_shared(torch.zeros(3))
        (True, False)
        """
        return self.transport.find_memory(address_of(tensor)) is not None

    def _checked_shape(self, shape: Any, dtype: Any) -> tuple[tuple[int, ...], Any]:
        """The shape as a tuple and the dtype as its library's own; tells the peers that this
        rank will not take part before it raises ValueError or TypeError."""
        try:
            lengths = tuple(map(operator.index, shape if hasattr(shape, "__iter__") else (shape,)))
            if any(length < 0 for length in lengths):
                raise ValueError(f"{lengths} is not the shape of a tensor")
            return lengths, _dtype_of(dtype)
        except (TypeError, ValueError) as error:
            self._refuse("allocate", error)

    def _refuse(self, operation: str, why: Exception) -> NoReturn:
        raise NotImplementedError  # a Communicator has it


def check_shareable(comm: SharedTensors, tensor: Any) -> Any:
    """A tensor or array that fits into shared memory; tells the peers before it raises
    TypeError."""
    why = None
    if not hasattr(tensor, "dtype") or not hasattr(tensor, "shape"):
        why = f"{type(tensor).__name__} is neither a tensor nor an array"
    elif hasattr(tensor, "device") and hasattr(tensor, "is_cpu") and not tensor.is_cpu:
        why = f"a tensor on {tensor.device} cannot be in shared memory, which holds CPU tensors"
    elif "strided" not in str(getattr(tensor, "layout", "strided")):
        why = f"a tensor of layout {tensor.layout} has no plain memory"
    if why:
        comm._refuse("allocate", TypeError(why))
    return tensor


def _is_of_torch(dtype: Any) -> bool:
    return type(dtype).__module__ == "torch"


def _dtype_of(dtype: Any) -> Any:
    if dtype is None:
        import torch

        return torch.get_default_dtype()
    if _is_of_torch(dtype):
        return dtype
    import numpy

    known = numpy.dtype(dtype)
    if known.hasobject:
        raise TypeError("Python objects cannot be in shared memory")
    return known


def _ordinary(shape: tuple[int, ...], dtype: Any) -> Any:
    if _is_of_torch(dtype):
        import torch

        return torch.empty(shape, dtype=dtype)
    import numpy

    return numpy.empty(shape, dtype)
