"""The collectives as plain functions: input first, results returned, inputs unchanged.

`all_reduce`, `broadcast` and `recv` work in place, and return what they were given. `src` and
`dst`, or `root` as their other name, are ranks of `group`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch

from unisono.collectives import arguments, ragged, structures
from unisono.collectives.arguments import inputs_first, is_tensor, result_or_work
from unisono.collectives.ragged import device_of
from unisono.collectives.types import Op, OutT, Rank, StructureT, TensorT
from unisono.comm.arguments import check_reduction
from unisono.comm.communicator import Algorithm, Group
from unisono.comm.tensors import Tensor, Tensors, dtype_name
from unisono.comm.work import Work
from unisono.world.world import needs_no_group, resolve, well_formed

_Tensor = torch.Tensor


@well_formed
def all_reduce(
    tensor: StructureT,
    op: Op = "sum",
    group: Group = None,
    *,
    out: StructureT | None = None,
    async_op: bool = False,
    algorithm: Algorithm = None,
    reproducible: bool | None = None,
) -> StructureT | Work[StructureT]:
    """Combine `tensor` over all ranks of `group`, in place: every rank has the result. Return it.

    `op` is "sum", "mean" ("avg"), "product" ("prod"), "min", "max", "band", "bor", "bxor", a torch
    ReduceOp or a `PremulSum`. `group` is a Communicator, a torch process group, or None: the world.
    A structure (dicts, lists, tuples, dataclasses of tensors and numbers) is reduced leaf by leaf,
    in one message per dtype: its tensors in place, its numbers in the structure that is returned.
    With `out` the result goes there and `tensor` stays as it is. With `async_op` a Work is returned
    at once, whose `wait()` returns the result. `algorithm`, the same on all ranks, is "ring" or
    another name of `unisono.plan.catalog("all_reduce")`, or a Schedule; None: the engine's own.
    With `reproducible` the bits of a sum do not depend on how the ranks are placed, and with
    `Communicator.all_reduce(contributions=)` not even on their number; None: `comm.reproducible`.

    Raises TypeError on every rank for the mean of integers. Raises ValueError on every rank for an
    unknown algorithm, and, with the path to the difference, if structures differ.

    Cost: each of n ranks moves 2 (n - 1) / n of the tensor's bytes, if these are many.
    See also `reduce`, `reduce_scatter`, `all_gather`, `differentiable`.

    >>> unisono.all_reduce(torch.tensor([1.0, 2.0]), "mean")
    tensor([1., 2.])
    >>> unisono.all_reduce({"loss": 0.5, "correct": torch.tensor([3])})
    {'loss': 1.0, 'correct': tensor([6])}
    """
    comm = resolve(group)
    if type(tensor) is not _Tensor and not is_tensor(tensor):
        if out is not None:
            why = "out= takes a tensor: it cannot be used with a structure"
            arguments.refuse_type(comm, "all_reduce", why)
        return structures.all_reduce(comm, tensor, op, async_op, algorithm, reproducible)
    if out is not None:
        tensor = arguments.copy_into(comm, "all_reduce", out, tensor, op, reproducible, algorithm)
    given: Any = tensor
    work: Any = comm.all_reduce(
        given, op, async_op=async_op, algorithm=algorithm, reproducible=reproducible
    )
    return arguments.ResultWork(work, tensor) if async_op else tensor


@well_formed
def reduce(
    tensor: TensorT,
    dst: Rank = None,
    op: Op = "sum",
    group: Group = None,
    *,
    root: Rank = None,
    out: TensorT | None = None,
    async_op: bool = False,
    reproducible: bool | None = None,
) -> TensorT | Work[TensorT | None] | None:
    """Combine `tensor` over all ranks of `group` by `op` ("sum", "mean", "max" ...). Returns the
    result on rank `dst` (or `root`), in `out` if it is given, and None elsewhere. `tensor` stays as
    it is. With `async_op` a Work is returned, whose `wait()` returns the same. `reproducible` is as
    in `all_reduce`.

    Raises TypeError for the mean of integers, ValueError if `dst` is not a rank of the group.

    Cost: every other rank sends the tensor's bytes once.
    See also `all_reduce`, `gather`.

    >>> total = unisono.reduce(torch.ones(2), dst=1)
    >>> total is None if comm.rank == 0 else total.tolist() == [2, 2]
    True
    """
    comm = resolve(group)
    arguments.check_tensor(comm, "reduce", tensor)
    dst = arguments.check_rank(comm, "reduce", dst, root)
    if comm.rank != dst:
        result, given = None, tensor.contiguous() if isinstance(tensor, _Tensor) else tensor
    else:
        result = (
            arguments.copy_of(tensor)
            if out is None
            else arguments.copy_into(comm, "reduce", out, tensor, op, reproducible)
        )
        given = result
    work = comm.reduce(given, dst, op, async_op=async_op, reproducible=reproducible)
    return result_or_work(work, async_op, result)


@well_formed
def broadcast(
    tensor: StructureT,
    src: Rank = None,
    group: Group = None,
    *,
    root: Rank = None,
    async_op: bool = False,
) -> StructureT | Work[StructureT]:
    """Copy the `tensor` of rank `src` (or `root`) to every rank of `group`, in place, and return
    it. With `async_op` a Work is returned, whose `wait()` returns it.

    In a structure all tensors travel together; the numbers in the structure that is returned are
    those of `src`.

    Raises ValueError on every rank, with the path, if structures differ, or `src` is not a rank.

    Cost: every other rank receives the tensor's bytes once.
    See also `scatter`, `broadcast_object`.

    >>> unisono.broadcast(torch.full((2,), comm.rank), src=1)
    tensor([1, 1])
    """
    if needs_no_group(group):
        return result_or_work(None, async_op, tensor)
    comm = resolve(group)
    if type(tensor) is not _Tensor and not is_tensor(tensor):
        src = arguments.check_rank(comm, "broadcast", src, root)
        return structures.broadcast(comm, tensor, src, async_op)
    work = comm.broadcast(tensor, root, src=src, async_op=async_op)  # type: ignore[arg-type]
    return result_or_work(work, async_op, tensor)


@overload
def all_gather(
    tensor: TensorT, group: Group = None, *, out: None = None, async_op: bool = False
) -> list[TensorT] | Work[list[TensorT]]: ...
@overload
def all_gather(
    tensor: Tensor, group: Group = None, *, out: OutT, async_op: bool = False
) -> OutT | Work[OutT]: ...
@inputs_first
def all_gather(
    tensor: Tensor, group: Group = None, *, out: Tensors | None = None, async_op: bool = False
) -> Tensors | Work[Any]:
    """Return a list of every rank's `tensor`, in rank order, on every rank of `group`.

    Shapes, numbers of dimensions and dtypes may differ from rank to rank (variable sizes), and
    tensors may be empty: each comes back as it is. If every rank passes `out`, a list of tensors or
    one wide tensor that fits, no shapes are exchanged and `out` is returned. With `async_op` shapes
    are exchanged at once and the elements later. `all_gather_object` gathers structures.

    Raises TypeError on every rank for what cannot be sent, ValueError if `out` does not fit.

    Cost: each of n ranks moves (n - 1) / n of the bytes of the result.
    See also `gather`, `all_gather_object`.

    >>> unisono.all_gather(torch.ones(comm.rank))
    [tensor([]), tensor([1.])]
    """
    comm = resolve(group)
    arguments.check_tensor(comm, "all_gather", tensor)
    if out is not None:
        return result_or_work(comm.all_gather(out, tensor, async_op=async_op), async_op, out)
    dense = arguments.as_dense_tensor(comm, "all_gather", tensor)
    result = ragged.gather(comm, dense, None, async_op=async_op)
    return result if dense is tensor else arguments.in_given_type(tensor, result)


@inputs_first
def gather(
    tensor: TensorT,
    dst: Rank = None,
    group: Group = None,
    *,
    root: Rank = None,
    out: Tensors | None = None,
    async_op: bool = False,
) -> list[TensorT] | Work[list[TensorT] | None] | None:
    """Return a list of every rank's `tensor`, in rank order, on rank `dst` (or `root`) of `group`,
    and None elsewhere.

    Shapes and dtypes may differ from rank to rank. `out`, on `dst`, is a list of tensors of the
    right shapes, and is returned. With `async_op` a Work is returned, whose `wait()` returns that.

    Raises TypeError for what cannot be sent, ValueError if `dst` is not a rank of the group.

    Cost: every other rank sends its tensor's bytes once, all to one rank.
    See also `all_gather`, `scatter`, `gather_object`.

    >>> everyone = unisono.gather(torch.tensor(comm.rank), dst=0)
    >>> everyone == ([torch.tensor(0), torch.tensor(1)] if comm.rank == 0 else None)
    True
    """
    if needs_no_group(group):
        return result_or_work(None, async_op, [arguments.copy_of(tensor)])
    comm = resolve(group)
    dst = arguments.check_rank(comm, "gather", dst, root)
    dense = arguments.as_dense_tensor(comm, "gather", tensor)
    buffers = None
    if out is not None and comm.rank == dst:
        buffers = arguments.parts(comm, "gather", out)
    return arguments.in_given_type(tensor, ragged.gather(comm, dense, dst, buffers, async_op))


@inputs_first
def scatter(
    tensors: TensorT | Sequence[TensorT] | None = None,
    src: Rank = None,
    group: Group = None,
    *,
    root: Rank = None,
    out: TensorT | None = None,
    async_op: bool = False,
) -> TensorT | Work[TensorT]:
    """Return part r of the `tensors` of rank `src` (or `root`) on rank r of `group`. Ranks other
    than `src` pass None.

    `tensors` is a list with a tensor for each rank, of one dtype and any shapes, or one tensor that
    is cut evenly along its first dimension. Receivers need not know shape or dtype; if they pass
    `out`, it must fit. With `async_op` a Work is returned, whose `wait()` returns the part.

    Raises ValueError for tensors that cannot be divided, or on a rank other than `src`; TypeError
    for several dtypes.

    Cost: every other rank receives its part's bytes once, all from one rank.
    See also `gather`, `broadcast`.

    >>> mine = unisono.scatter([torch.zeros(1), torch.ones(2)] if comm.rank == 0 else None)
    >>> mine.tolist() == ([0] if comm.rank == 0 else [1, 1])
    True
    """
    comm = resolve(group)
    src = arguments.check_rank(comm, "scatter", src, root)
    mine = None
    if comm.rank == src:
        if tensors is None:
            why = f"rank {src} is the source (src={src}), but passed None instead of tensors"
            comm.reject_call("scatter", f"{why}: pass one for each rank, or one to cut")
        mine = arguments.parts(comm, "scatter", tensors)
    elif tensors is not None:
        why = f"only rank {src}, the source, may pass tensors"
        comm.reject_call("scatter", f"{why}: pass None, and use the return value")
    device = device_of(comm) if mine is None else mine[0].device
    buffer = None if out is None else arguments.as_dense_tensor(comm, "scatter", out)
    result = ragged.scatter(comm, mine, src, buffer, device, async_op)
    given = tensors[0] if isinstance(tensors, (list, tuple)) else tensors
    return arguments.in_given_type(given if out is None else out, result)


@inputs_first
def reduce_scatter(
    tensors: TensorT | Sequence[TensorT],
    op: Op = "sum",
    group: Group = None,
    *,
    out: TensorT | None = None,
    async_op: bool = False,
    reproducible: bool | None = None,
) -> TensorT | Work[TensorT]:
    """Combine `tensors` over all ranks of `group` by `op` ("sum", "mean", "max" ...), and return
    part r of the result on rank r, in `out` if it is given.

    `tensors` is a list with a tensor for each rank, or one tensor that is cut evenly along its
    first dimension. With `async_op` a Work is returned, whose `wait()` returns the part.
    `reproducible` is as in `all_reduce`.

    Raises TypeError for the mean of integers, ValueError for tensors that cannot be divided.

    Cost: each of n ranks moves (n - 1) / n of the bytes of `tensors`, if these are many.
    See also `all_reduce`, `all_gather`.

    >>> unisono.reduce_scatter(torch.tensor([1.0, 2.0])) / (comm.rank + 1)  # [2] and [4]
    tensor([2.])
    """
    comm = resolve(group)
    if isinstance(tensors, (list, tuple)):
        arguments.check_parts(comm, "reduce_scatter", tensors)
        shape, like = tensors[comm.rank].shape, tensors[comm.rank]
    else:
        shape, like = arguments.part_shape(comm, "reduce_scatter", tensors), tensors
    output = arguments.empty(like, shape) if out is None else out
    work = comm.reduce_scatter(output, tensors, op, async_op=async_op, reproducible=reproducible)
    return result_or_work(work, async_op, output)


@overload
def all_to_all(
    tensors: TensorT, group: Group = None, *, out: TensorT | None = None, async_op: bool = False
) -> TensorT | Work[TensorT]: ...
@overload
def all_to_all(
    tensors: Sequence[TensorT],
    group: Group = None,
    *,
    out: Sequence[TensorT] | None = None,
    async_op: bool = False,
) -> list[TensorT] | Work[list[TensorT]]: ...
@inputs_first
def all_to_all(
    tensors: Tensors, group: Group = None, *, out: Tensors | None = None, async_op: bool = False
) -> Tensors | Work[Any]:
    """Exchange parts: part i of rank j's `tensors` is part j of the result on rank i of `group`.

    One tensor is cut evenly along its first dimension, and the result has its shape. For uneven
    parts (variable sizes), pass a list with a tensor for each rank, of one dtype and any shapes:
    the result is a list, and the receivers need no split sizes. If every rank passes `out`, the
    result goes there and no shapes are exchanged. With `async_op` a Work is returned, whose
    `wait()` returns the result.

    Raises ValueError for tensors that cannot be divided, TypeError for several dtypes.

    Cost: each of n ranks moves (n - 1) / n of the bytes of `tensors`.
    See also `all_gather`, `batch_isend_irecv`.

    >>> unisono.all_to_all(torch.tensor([10, 20])) - 10 * comm.rank  # [10, 10] and [20, 20]
    tensor([10, 10])
    >>> received = unisono.all_to_all([torch.ones(1), torch.ones(2)])
    >>> [len(part) - comm.rank for part in received]
    [1, 1]
    """
    comm = resolve(group)
    listed = isinstance(tensors, (list, tuple))
    if not listed:
        arguments.part_shape(comm, "all_to_all", tensors)
        out = arguments.empty(tensors, tensors.shape) if out is None else out  # type: ignore[union-attr]
    if out is not None:
        return result_or_work(comm.all_to_all(out, tensors, async_op=async_op), async_op, out)
    result = ragged.all_to_all(comm, arguments.parts(comm, "all_to_all", tensors), async_op)
    return arguments.in_given_type(tensors[0], result)


# -- for training loops; they also work in one process ---------------------------------------------


@well_formed
def reduce_tensor(
    tensor: TensorT, op: Op = "mean", group: Group = None, *, async_op: bool = False
) -> TensorT | Work[TensorT]:
    """Return `tensor` combined over all ranks of `group` by `op`, on every rank. The input stays as
    it is. With `async_op` a Work is returned, whose `wait()` returns the result.

    Raises TypeError on every rank for the mean of integers, ValueError for an unknown `op`.
    Cost: that of `all_reduce`, and a copy. See also `all_reduce`.

    >>> loss = torch.tensor(comm.rank + 1.0)
    >>> unisono.reduce_tensor(loss)  # the mean of 1 and 2
    tensor(1.5000)
    >>> unisono.reduce_tensor(loss, "sum", async_op=True).wait()
    tensor(3.)
    """
    if needs_no_group(group) and check_reduction(op, [dtype_name(tensor)]).factor == 1:
        return result_or_work(None, async_op, arguments.copy_of(tensor))
    return all_reduce(arguments.copy_of(tensor), op, group, async_op=async_op)


gather_tensor = gather
broadcast_tensor = broadcast
