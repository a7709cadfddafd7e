"""Collectives on structures: many tensors and numbers in few messages.

Every rank says first, in 16 bytes, what its structure looks like. Where two differ, all ranks
raise, and the group goes on. Numbers travel as float64, int64, complex128 or bool.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy
import torch

from unisono.collectives import ragged
from unisono.collectives.encoding import decode, encode, torch_dtype
from unisono.collectives.integers import all_gather_integers, device_of
from unisono.collectives.objects import all_gather_object
from unisono.collectives.reductions import reduction
from unisono.collectives.refusals import as_dense_tensor, refuse_type
from unisono.collectives.results import result_or_work
from unisono.collectives.tensor_bytes import bytes_of, flat_bytes, tensor_from_bytes
from unisono.collectives.trees import (
    Tree,
    description,
    difference,
    paths_of,
    put_together,
    signature,
    take_apart,
)
from unisono.comm.base import Communicator, Op, PremulSum, dtype_name, has_meaning, name_of_dtype

if TYPE_CHECKING:
    from unisono.plan.schedule import Schedule

_DTYPES: dict[type, torch.dtype] = {
    float: torch.float64,
    int: torch.int64,
    complex: torch.complex128,
    bool: torch.bool,
}


def all_reduce(
    comm: Communicator,
    structure: Any,
    op: Any,
    async_op: bool,
    algorithm: str | Schedule | None = None,
) -> Any:
    """Reduce every leaf over all ranks."""
    known = reduction(op, comm, "all_reduce")
    tree = _take_apart_alike(comm, "all_reduce", structure, known)
    call = partial(comm.all_reduce, op=known, async_op=async_op, algorithm=algorithm)
    return _call_in_place(comm, structure, tree, async_op, call)


def broadcast(comm: Communicator, structure: Any, src: int, async_op: bool) -> Any:
    """Copy every leaf of rank `src` to all ranks."""
    tree = _take_apart_alike(comm, "broadcast", structure, None)
    return _call_in_place(
        comm, structure, tree, async_op, lambda row: comm.broadcast(row, src, async_op=async_op)
    )


# -- in place ------------------------------------------------------------------------------------


def _take_apart_alike(comm: Communicator, operation: str, structure: Any, op: Op | None) -> Tree:
    """The structure taken apart, once it is known that all ranks have one like it."""
    tree = _take_apart(comm, operation, structure)
    if op is not None:
        _check_meaning(comm, operation, tree, op)
    mine = struct.unpack("=2q", signature(tree))
    everyone = all_gather_integers(comm, mine, device_of(comm))
    if everyone.count(mine) < comm.size:
        raise _difference_error(comm, operation, all_gather_object(description(tree), comm))
    return tree


def _take_apart(comm: Communicator, operation: str, structure: Any) -> Tree:
    try:
        tree = take_apart(structure)
    except TypeError as error:
        refuse_type(comm, operation, str(error))
    if operation in ("all_reduce", "broadcast"):
        for number in tree.numbers:
            if type(number) is int and not -(2**63) <= number < 2**63:
                comm.refuse(operation, f"{number} does not fit into 64 bits: pass a float")
    return tree


def _check_meaning(comm: Communicator, operation: str, tree: Tree, op: Op) -> None:
    name = "premul_sum" if isinstance(op, PremulSum) else op
    for dtype in map(name_of_dtype, tree.dtypes):
        if not has_meaning(name, dtype):
            where = paths_of(tree, [dtype])
            reduction(op, comm, operation, *tree.tensors, where=where)
    for kind in {type(number) for number in tree.numbers}:
        sample = torch.empty(0, dtype=_DTYPES[kind])
        if not has_meaning(name, dtype_name(sample)):
            where = paths_of(tree, [kind.__name__])
            reduction(op, comm, operation, sample, where=where)


def _difference_error(comm: Communicator, operation: str, descriptions: Any) -> ValueError:
    return ValueError(
        f"{operation} on group {comm.name}: the ranks' structures differ: "
        f"{difference(descriptions)}"
    )


def _call_in_place(
    comm: Communicator,
    structure: Any,
    tree: Tree,
    async_op: bool,
    call: Callable[[list[Any]], Any],
) -> Any:
    """Make the call on all leaves at once; the structure that it leads to."""
    rows = tree.tensors
    if not tree.are_distinct:  # each one once
        rows = list({id(tensor): tensor for tensor in rows}.values())
    if not tree.numbers:
        return result_or_work(call(rows) if rows else None, async_op, structure)
    device = device_of(comm)
    packed = {
        kind: torch.tensor(
            [number for number in tree.numbers if type(number) is kind], dtype=dtype, device=device
        )
        for kind, dtype in _DTYPES.items()
        if kind in map(type, tree.numbers)
    }
    work = call([*rows, *packed.values()])

    def finish() -> Any:
        queues = {kind: iter(row.tolist()) for kind, row in packed.items()}
        numbers = [next(queues[type(number)]) for number in tree.numbers]
        return put_together(structure, tree.tensors, numbers)

    return result_or_work(work, async_op, None, finish)


# -- gathering -----------------------------------------------------------------------------------


def gather(comm: Communicator, structure: Any, dst: int | None, async_op: bool) -> Any:
    """Every rank's structure, on rank `dst` or, with None, on every rank.

    Two messages: what everybody has, then all tensors of a rank as one row of bytes.
    """
    operation = "all_gather" if dst is None else "gather"
    tree = _take_apart(comm, operation, structure)
    tensors = [as_dense_tensor(comm, operation, leaf) for leaf in tree.tensors]
    device = tensors[0].device if tensors else torch.device(device_of(comm))
    shapes = [[dtype_name(tensor), list(tensor.shape)] for tensor in tensors]
    skeleton = description(tree, shapes=False)
    mine = tensor_from_bytes(encode([skeleton, shapes, tree.numbers]), device)
    everyone = [decode(bytes_of(theirs)) for theirs in ragged.gather(comm, mine, None)]
    skeletons = [skeleton for skeleton, _, _ in everyone]
    if any(skeleton != skeletons[0] for skeleton in skeletons):
        raise _difference_error(comm, operation, skeletons)
    row = _pack_row([flat_bytes(tensor) for tensor in tensors], device)
    lengths = [sum(_align(_byte_count(*leaf)) for leaf in shapes) for _, shapes, _ in everyone]
    work, rows = None, None
    if dst is None or comm.rank == dst:
        rows = [torch.empty(length, dtype=torch.uint8, device=device) for length in lengths]
    if any(lengths):
        work = ragged.gather_rows(comm, rows, row, dst, async_op)

    def finish() -> Any:
        if rows is None:
            return None
        arrays = [isinstance(leaf, numpy.ndarray) for leaf in tree.tensors]
        return [
            put_together(structure, _unpack_row(row, shapes, arrays), numbers)
            for row, (_, shapes, numbers) in zip(rows, everyone, strict=True)
        ]

    return result_or_work(work, async_op, None, finish)


_ALIGNMENT = 16
"""Every tensor begins where an element of any dtype may."""


def _align(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def _byte_count(dtype: str, shape: list[int]) -> int:
    return torch_dtype(dtype).itemsize * math.prod(shape)


def _pack_row(parts: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    pieces: list[torch.Tensor] = []
    padding = torch.zeros(_ALIGNMENT, dtype=torch.uint8, device=device)
    for part in parts:
        count = part.numel()
        pieces.append(part.to(device))
        if _align(count) != count:
            pieces.append(padding[: _align(count) - count])
    return torch.cat(pieces) if pieces else padding[:0]


def _unpack_row(row: torch.Tensor, shapes: list[Any], arrays: list[bool]) -> list[Any]:
    """The tensors in a row of bytes, each with memory of its own."""
    leaves: list[Any] = []
    at = 0
    for (dtype, shape), is_array in zip(shapes, arrays, strict=True):
        count = _byte_count(dtype, shape)
        leaf = row[at : at + count].view(torch_dtype(dtype)).view(shape).clone()
        leaves.append(leaf.numpy() if is_array else leaf)
        at += _align(count)
    return leaves
