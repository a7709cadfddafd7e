"""Collectives on structures: many tensors and numbers in few messages.

Every rank says first, in 16 bytes, what its structure looks like. Where two differ, all ranks
raise, and the group goes on. Numbers travel as float64, int64, complex128 or bool.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy
import torch

from unisono.collectives.arguments import as_dense_tensor, reduction, refuse_type
from unisono.collectives.encoding import decode
from unisono.collectives.objects import all_gather_object, encode_all, gather_bytes
from unisono.collectives.ragged import all_gather_integers, bytes_of, device_of
from unisono.collectives.results import result_or_work
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
    """Every rank's structure, on rank `dst` or, with None, on every rank."""
    operation = "all_gather" if dst is None else "gather"
    tree = _take_apart(comm, operation, structure)
    leaves = [_plain_leaf(comm, operation, leaf) for leaf in tree.tensors]
    mine = struct.unpack("=2q", signature(tree, shapes=False))
    data, lengths, signatures = encode_all(comm, [leaves, tree.numbers], marks=mine)
    if signatures.count(mine) < comm.size:
        described = all_gather_object(description(tree, shapes=False), comm)
        raise _difference_error(comm, operation, described)
    rows, work = gather_bytes(comm, data, lengths, dst, async_op)
    devices = {leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)}

    def rebuild(row: torch.Tensor) -> Any:
        leaves, numbers = decode(bytes_of(row))
        if len(devices) == 1:
            (device,) = devices
            leaves = [leaf.to(device) if hasattr(leaf, "to") else leaf for leaf in leaves]
        return put_together(structure, leaves, numbers)

    def finish() -> Any:
        return None if rows is None else list(map(rebuild, rows))

    return result_or_work(work, async_op, None, finish)


def _plain_leaf(comm: Communicator, operation: str, leaf: Any) -> Any:
    """A leaf as `encode` takes it."""
    dense = as_dense_tensor(comm, operation, leaf)
    return leaf if isinstance(leaf, numpy.ndarray) else dense.detach()
