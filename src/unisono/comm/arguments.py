"""What makes no sense as an argument, said in one sentence: the rules of all implementations.

Each function raises ValueError or TypeError with the bare reason; whoever calls it adds the
operation and the group, and tells the peers. What the engine checks itself, because it reads the
tensors anyway (csrc/python/tensors.c, calls.c), it refuses with the same texts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from unisono.comm.base import (
    REDUCTIONS,
    AnyOp,
    Communicator,
    PremulSum,
    count,
    dtype_name,
    has_meaning,
    holds,
)
from unisono.comm.reductions import known_reduction
from unisono.errors import name_ranks

LISTS = (list, tuple)


# -- reductions ------------------------------------------------------------------------------------


def check_reduction(op: AnyOp, dtypes: Iterable[str], also: str | None = None) -> tuple[str, float]:
    """The name and the factor of a reduction that means something for all of these dtypes; `also`
    is one that an implementation has beside the usual ones."""
    factor = 1.0
    known: Any = op if isinstance(op, str) and op == also else known_reduction(op)
    if known is None:
        raise ValueError(describe_unknown_reduction(op))
    if isinstance(known, PremulSum):
        try:
            factor = float(known.factor)
        except (TypeError, ValueError):
            raise ValueError(f"the factor {known.factor!r} is not a number") from None
    name: str = "premul_sum" if isinstance(known, PremulSum) else known
    for dtype in dtypes:
        if not has_meaning(name, dtype):
            raise TypeError(describe_meaningless(name, dtype))
        if not holds(dtype, factor):
            raise ValueError(f"{dtype} cannot be scaled by {factor}")
    return name, factor


def describe_unknown_reduction(op: object) -> str:
    """The reason for refusing what is not a reduction."""
    return f"unknown reduction {op!r}: use {', '.join(REDUCTIONS)}, PremulSum or a torch ReduceOp"


def describe_meaningless(name: str, dtype: str) -> str:
    """The reason for refusing a reduction of this dtype, and what to do instead."""
    remedy = ""
    if name == "avg":
        remedy = ': pass a floating tensor (x.float()), or use op="sum" and divide'
    elif name in ("band", "bor", "bxor"):
        remedy = ": it combines bits, which only integers and bools have"
    return f"{name} has no meaning for {dtype}{remedy}"


# -- ranks -----------------------------------------------------------------------------------------


class NotARank(ValueError):
    """`rank`, which was passed as `what`, is not a rank of a group of `size`."""

    def __init__(self, what: str, rank: object, size: int) -> None:
        super().__init__(f"{what} {rank!r} is not a rank of a group of {size}")
        self.rank = rank

    def among(self, global_ranks: Sequence[int] | None) -> str:
        """The reason, and what was meant if it is a global rank of a group of these, or a group."""
        if isinstance(self.rank, Communicator) or hasattr(self.rank, "rank"):
            return f"{self}: pass a group by its name, group=..."
        if not isinstance(self.rank, int) or not global_ranks:
            return str(self)
        if list(global_ranks) == list(range(len(global_ranks))):
            return str(self)
        text = f"{self}: ranks count from 0 in every group, and this one's members are global "
        text += name_ranks(global_ranks)
        if self.rank in global_ranks:
            text += f": for global rank {self.rank} pass {global_ranks.index(self.rank)}"
        return text


def check_root(root: object, size: int) -> None:
    """A root must be a rank of the group."""
    if not isinstance(root, int) or not 0 <= root < size:
        raise NotARank("root", root, size)


def check_wide_side(root: int, rank: int, size: int, wide: Any, side: str) -> None:
    """The root of a gather passes an output, of a scatter an input, and nobody else does."""
    check_root(root, size)
    if wide is None and rank == root:
        raise ValueError(f"the root must pass an {side}")
    if wide is not None and rank != root:
        raise ValueError(f"only the root passes an {side}: pass None")


def check_peer(peer: object, size: int) -> None:
    """A message's peer must be a rank of the group."""
    if type(peer) is not int or not 0 <= peer < size:
        raise NotARank("peer", peer, size)


# -- sizes and dtypes ------------------------------------------------------------------------------


def check_coalesced(output: Any, input: Any) -> None:
    """A coalesced call has two lists of one length."""
    if not isinstance(output, LISTS) or not isinstance(input, LISTS):
        raise TypeError("a coalesced call takes a list on both sides")
    if len(output) != len(input):
        raise ValueError(f"{len(output)} outputs for {len(input)} inputs")


def check_parts(tensors: Sequence[Any], size: int, is_list: bool) -> tuple[int, ...]:
    """How many elements each rank's part of a wide side has: one tensor cut evenly, or a list."""
    if len({dtype_name(tensor) for tensor in tensors}) > 1:
        raise TypeError("the tensors of one call have different dtypes")
    if is_list:
        if len(tensors) != size:
            raise ValueError(f"a list of {len(tensors)} tensors in a group of {size} ranks")
        return tuple(count(tensor) for tensor in tensors)
    (tensor,) = tensors
    if count(tensor) % size:
        raise ValueError(
            f"{count(tensor)} elements cannot be cut evenly into {size} parts: pass a list with "
            "one tensor per rank"
        )
    return (count(tensor) // size,) * size


def check_own_part(given: int, taken: int, dtypes: Iterable[str]) -> None:
    """What a rank gives itself must be as long as what it takes, and of one dtype."""
    if len(set(dtypes)) > 1:
        raise TypeError("input and output have different dtypes")
    if given != taken:
        raise ValueError(
            f"this rank's part has {given} elements in the input and {taken} in the output"
        )


# -- tensors ---------------------------------------------------------------------------------------


def check_tensor(tensor: Any, writable: bool, devices: Collection[str]) -> None:
    """A tensor or array must have plain memory on one of these devices."""
    if hasattr(tensor, "layout") and hasattr(tensor, "device"):
        _check_torch_tensor(tensor, devices)
    else:
        _check_array(tensor, writable, devices)
    if writable:
        from unisono.comm.overlaps import overlaps_itself  # it needs NumPy, as tensors do not

        if overlaps_itself(tensor):
            raise ValueError(
                "an expanded or overlapping tensor cannot receive a result: several of its "
                "elements share an address; pass a .clone()"
            )


def _check_array(tensor: Any, writable: bool, devices: Collection[str]) -> None:
    if tensor is None:
        raise TypeError("None in place of a tensor")
    if not hasattr(tensor, "__array_interface__"):
        raise TypeError(f"{type(tensor).__name__} is neither a tensor nor an array")
    if "cpu" not in devices:
        raise TypeError(f"an array lies in the CPU's memory: pass a tensor on {_either(devices)}")
    if tensor.dtype.kind not in "biufc" or not tensor.dtype.isnative:
        raise TypeError(f"{tensor.dtype} elements are not plain numbers")
    if hasattr(tensor, "mask"):
        raise TypeError("a masked array's hidden elements would count: pass .filled(...) or .data")
    if writable and not tensor.flags.writeable:
        raise ValueError("a read-only array cannot receive a result")


def _check_torch_tensor(tensor: Any, devices: Collection[str]) -> None:
    import torch

    plain = tensor.layout is torch.strided and tensor.device.type in devices
    odd = tensor.is_nested or tensor.is_quantized
    if not plain or odd or dtype_name(tensor).startswith("bits"):
        raise _without_memory(tensor, devices)
    try:
        has_bytes, address = tensor.untyped_storage().nbytes(), tensor.data_ptr()
    except RuntimeError:  # one that a transform of functions made
        raise _without_memory(tensor, devices) from None
    needs_bytes = _end_in_storage(tensor)
    if needs_bytes and not address:
        raise TypeError(
            f"{type(tensor).__name__} has elements but no memory of its own (a lazy zero, a "
            "wrapper, a storage resized to nothing): pass a plain tensor"
        )
    if needs_bytes > has_bytes:
        raise ValueError(
            f"a tensor that ends at byte {needs_bytes} has a storage of {has_bytes}, which "
            "somebody resized: resize it back, or pass another tensor"
        )


def _without_memory(tensor: Any, devices: Collection[str]) -> TypeError:
    return TypeError(
        f"a {type(tensor).__name__} of {tensor.dtype}, {tensor.layout} on device "
        f"{tensor.device} has no plain memory to share: pass a dense tensor on {_either(devices)}"
    )


def _end_in_storage(tensor: Any) -> int:
    """Where in its storage a tensor ends."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((length - 1) * step for length, step in steps)
    return int(last + 1) * int(tensor.element_size())


def _either(devices: Collection[str]) -> str:
    return " or ".join(sorted(devices))
