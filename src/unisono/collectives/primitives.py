"""The collectives as plain functions: input first, results returned, inputs left alone.

`all_reduce`, `broadcast` and `recv` work in place, and return what they were given. `group` is a
Communicator, a torch process group or None for the world; `src` and `dst` are ranks of that group.
With `async_op` a function returns a Work at once, whose `wait()` returns the result; until then
its tensors must not be touched. `op` is "sum", "mean" ("avg"), "product" ("prod"), "min", "max",
"band", "bor", "bxor", a torch ReduceOp or a `PremulSum`.

Every member of the group calls the same function. Where that is not so, or an argument makes no
sense on one of them, every rank raises: see `unisono.Communicator`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch

from unisono.collectives import ragged, structures
from unisono.collectives.integers import device_of
from unisono.collectives.reductions import reduction
from unisono.collectives.refusals import (
    as_dense_tensor,
    check_out,
    check_rank,
    refuse_type,
    resolve_for,
)
from unisono.collectives.results import ResultWork, result_or_work
from unisono.comm.base import Communicator, Message, Work
from unisono.world.world import resolve

_Tensor = torch.Tensor


def all_reduce(
    tensor: Any, op: Any = "sum", group: Any = None, *, out: Any = None, async_op: bool = False
) -> Any:
    """Combine `tensor` over all ranks, in place; every rank has the result, and it is returned.

    A structure (dicts, lists, tuples, dataclasses of tensors and numbers) is reduced leaf by leaf,
    in one message per dtype: its tensors in place, its numbers in the structure that is returned.
    With `out` the result goes there and `tensor` stays as it is.

    Raises TypeError on every rank for the mean of integers, and ValueError on every rank, with the
    path to the difference, where structures differ.
    """
    comm = resolve(group)
    if type(tensor) is not _Tensor and not _is_tensor(tensor):
        _refuse_out(comm, "all_reduce", out)
        return structures.all_reduce(comm, tensor, op, async_op)
    if op != "sum":
        op = reduction(op, comm, "all_reduce", tensor)
    if out is not None:
        tensor = _copy_into(comm, "all_reduce", out, tensor)
    if async_op:
        return ResultWork(comm.all_reduce(tensor, op, async_op=True), tensor)
    comm.all_reduce(tensor, op)
    return tensor


def reduce(
    tensor: Any,
    dst: int = 0,
    op: Any = "sum",
    group: Any = None,
    *,
    out: Any = None,
    async_op: bool = False,
) -> Any:
    """Combine `tensor` over all ranks; returns the result on rank `dst` and None elsewhere."""
    comm = resolve(group)
    _check_tensor(comm, "reduce", tensor)
    op = reduction(op, comm, "reduce", tensor)
    check_rank(comm, "reduce", dst)
    if comm.rank != dst:
        given = tensor.contiguous() if isinstance(tensor, _Tensor) else tensor
        return result_or_work(comm.reduce(given, dst, op, async_op=async_op), async_op, None)
    result = copy_of(tensor) if out is None else _copy_into(comm, "reduce", out, tensor)
    return result_or_work(comm.reduce(result, dst, op, async_op=async_op), async_op, result)


def broadcast(tensor: Any, src: int = 0, group: Any = None, *, async_op: bool = False) -> Any:
    """Copy rank `src`'s tensor to every rank, in place, and return it.

    In a structure all tensors travel together; the numbers in the structure that is returned are
    those of `src`. Raises ValueError on every rank, with the path, where structures differ.
    """
    comm = resolve(group)
    if type(tensor) is not _Tensor and not _is_tensor(tensor):
        check_rank(comm, "broadcast", src)
        return structures.broadcast(comm, tensor, src, async_op)
    return result_or_work(comm.broadcast(tensor, src, async_op=async_op), async_op, tensor)


def all_gather(tensor: Any, group: Any = None, *, out: Any = None, async_op: bool = False) -> Any:
    """A list of every rank's tensor, in rank order, on every rank.

    Shapes, numbers of dimensions and dtypes may differ from rank to rank, and tensors may be
    empty: each comes back as it is. Of structures, every rank has every rank's. With `out`, on
    every rank, a list of tensors or one wide tensor that fits, no shapes are exchanged, and `out`
    is returned. With `async_op` shapes are exchanged at once and only the elements later.
    """
    comm = resolve_for("all_gather", group)
    if out is not None:
        _check_tensor(comm, "all_gather", tensor)
        return result_or_work(comm.all_gather(out, tensor, async_op=async_op), async_op, out)
    if not _is_tensor(tensor):
        return structures.gather(comm, tensor, None, async_op)
    dense = as_dense_tensor(comm, "all_gather", tensor)
    result = ragged.gather(comm, dense, None, async_op=async_op)
    return _in_given_type(tensor, result)


def gather(
    tensor: Any, dst: int = 0, group: Any = None, *, out: Any = None, async_op: bool = False
) -> Any:
    """A list of every rank's tensor, in rank order, on rank `dst`; None elsewhere.

    Shapes may differ, as in `all_gather`, and structures are gathered whole. `out`, on `dst`, is a
    list of tensors of the right shapes, and is returned.
    """
    comm = resolve_for("gather", group)
    check_rank(comm, "gather", dst)
    if not _is_tensor(tensor):
        _refuse_out(comm, "gather", out)
        return structures.gather(comm, tensor, dst, async_op)
    buffers = None
    if out is not None and comm.rank == dst:
        buffers = parts(comm, "gather", out)
    result = ragged.gather(comm, as_dense_tensor(comm, "gather", tensor), dst, buffers, async_op)
    return _in_given_type(tensor, result)


def scatter(
    tensors: Any = None,
    src: int = 0,
    group: Any = None,
    *,
    out: Any = None,
    async_op: bool = False,
) -> Any:
    """Part r of rank `src`'s `tensors`, on rank r; the other ranks pass None.

    `tensors` is a list with a tensor for each rank, of one dtype and any shapes, or one tensor
    that is cut evenly along its first dimension. Receivers need not know shape or dtype; where
    they pass `out`, it must fit.
    """
    comm = resolve_for("scatter", group)
    check_rank(comm, "scatter", src)
    mine = None
    if comm.rank == src:
        mine = parts(comm, "scatter", tensors)
    elif tensors is not None:
        comm.refuse(
            "scatter",
            f"only rank {src}, the source, passes tensors: pass None, and take what is returned",
        )
    device = device_of(comm) if mine is None else mine[0].device
    buffer = None if out is None else as_dense_tensor(comm, "scatter", out)
    result = ragged.scatter(comm, mine, src, buffer, device, async_op)
    given = tensors[0] if isinstance(tensors, (list, tuple)) else tensors
    return _in_given_type(given if out is None else out, result)


def reduce_scatter(
    tensors: Any, op: Any = "sum", group: Any = None, *, out: Any = None, async_op: bool = False
) -> Any:
    """Combine `tensors` over all ranks; rank r has part r of the result.

    `tensors` is a list with a tensor for each rank, or one tensor that is cut evenly along its
    first dimension.
    """
    comm = resolve_for("reduce_scatter", group)
    if isinstance(tensors, (list, tuple)):
        _check_parts(comm, "reduce_scatter", tensors)
        shape, like = tensors[comm.rank].shape, tensors[comm.rank]
    else:
        shape, like = _part_shape(comm, "reduce_scatter", tensors), tensors
    op = reduction(op, comm, "reduce_scatter", like)
    output = _empty(like, shape) if out is None else out
    return result_or_work(
        comm.reduce_scatter(output, tensors, op, async_op=async_op), async_op, output
    )


def all_to_all(tensors: Any, group: Any = None, *, out: Any = None, async_op: bool = False) -> Any:
    """Part i of rank j's `tensors` is part j of rank i's result.

    Of a list with a tensor for each rank, of one dtype and any shapes, the result is a list; of a
    tensor that is cut evenly along its first dimension, a tensor of the same shape.
    """
    comm = resolve_for("all_to_all", group)
    listed = isinstance(tensors, (list, tuple))
    if not listed:
        _part_shape(comm, "all_to_all", tensors)
        out = _empty(tensors, tensors.shape) if out is None else out
    if out is not None:
        return result_or_work(comm.all_to_all(out, tensors, async_op=async_op), async_op, out)
    result = ragged.all_to_all(comm, parts(comm, "all_to_all", tensors), async_op)
    return _in_given_type(tensors[0], result)


# -- point to point ------------------------------------------------------------------------------


def send(tensor: Any, dst: int, group: Any = None, *, tag: int = 0) -> None:
    """Send `tensor` to rank `dst`; returns once a receiver has matched it, at every size."""
    resolve(group).send(tensor, dst, tag)


def recv(tensor: Any, src: int | None = None, group: Any = None, *, tag: int = 0) -> Any:
    """Receive into `tensor` from rank `src`, or from anybody, and return it."""
    resolve(group).recv(tensor, src, tag)
    return tensor


def isend(tensor: Any, dst: int, group: Any = None, *, tag: int = 0) -> Work:
    """As `send`, but go on at once."""
    return resolve(group).isend(tensor, dst, tag)


def irecv(tensor: Any, src: int | None = None, group: Any = None, *, tag: int = 0) -> ResultWork:
    """As `recv`, but go on at once: the work's `wait()` returns the tensor, and its
    `source_rank()` says who sent it."""
    return ResultWork(resolve(group).irecv(tensor, src, tag), tensor)


def batch_isend_irecv(messages: Sequence[Message], group: Any = None) -> list[Work]:
    """Start many messages together; no order among them can make them block each other."""
    return resolve(group).batch_isend_irecv(messages)


# -- what stands behind them ---------------------------------------------------------------------


def _is_tensor(tensor: Any) -> bool:
    return isinstance(tensor, (_Tensor, numpy.ndarray))


def _check_tensor(comm: Communicator, operation: str, tensor: Any) -> None:
    if not _is_tensor(tensor):
        refuse_type(comm, operation, f"{type(tensor).__name__} is neither a tensor nor an array")


def _refuse_out(comm: Communicator, operation: str, out: Any) -> None:
    if out is not None:
        refuse_type(comm, operation, "out= is for tensors: it does not go with a structure")


def copy_of(tensor: Any) -> Any:
    """A contiguous copy without history."""
    if isinstance(tensor, _Tensor):
        return tensor.detach().clone(memory_format=torch.contiguous_format)
    return tensor.copy()


def _copy_into(comm: Communicator, operation: str, out: Any, tensor: Any) -> Any:
    """`out`, with the elements of `tensor`."""
    if type(out) is not type(tensor) and not _is_tensor(out):
        refuse_type(comm, operation, f"out is {type(out).__name__}, not a tensor or an array")
    check_out(comm, operation, out, tensor.dtype, tensor.shape)
    if isinstance(out, _Tensor):
        out.detach().copy_(tensor.detach())
    else:
        out[...] = tensor
    return out


def _empty(like: Any, shape: Any) -> Any:
    if isinstance(like, _Tensor):
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    return numpy.empty(shape, like.dtype)


def _part_shape(comm: Communicator, operation: str, tensor: Any) -> tuple[int, ...]:
    """The shape of a rank's part of a tensor that is cut along its first dimension."""
    _check_tensor(comm, operation, tensor)
    shape = tuple(tensor.shape)
    if not shape or shape[0] % comm.size:
        comm.refuse(
            operation,
            f"a tensor of shape {shape} cannot be cut evenly for {comm.size} ranks: pass a list of "
            "tensors",
        )
    return (shape[0] // comm.size, *shape[1:])


def _check_parts(comm: Communicator, operation: str, tensors: Any) -> None:
    if len(tensors) != comm.size:
        comm.refuse(operation, f"{len(tensors)} tensors for {comm.size} ranks")
    for tensor in tensors:
        _check_tensor(comm, operation, tensor)
    dtypes = sorted({str(tensor.dtype) for tensor in tensors})
    if len(dtypes) > 1:
        refuse_type(comm, operation, f"tensors of one call have one dtype, not {dtypes}")


def parts(comm: Communicator, operation: str, tensors: Any) -> list[torch.Tensor]:
    """One tensor for each rank."""
    if isinstance(tensors, (list, tuple)):
        _check_parts(comm, operation, tensors)
        return [as_dense_tensor(comm, operation, tensor) for tensor in tensors]
    length = _part_shape(comm, operation, tensors)[0]
    whole = as_dense_tensor(comm, operation, tensors)
    return [whole[rank * length : (rank + 1) * length] for rank in range(comm.size)]


def _in_given_type(given: Any, result: Any) -> Any:
    """Arrays where arrays were given."""
    if not isinstance(given, numpy.ndarray) or result is None:
        return result
    if isinstance(result, ResultWork):
        return ResultWork(result, finish=lambda: _in_given_type(given, result.wait()))
    if isinstance(result, list):
        return [tensor.numpy() for tensor in result]
    return result.numpy()
