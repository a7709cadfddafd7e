"""Reducing, gathering and broadcasting one tensor, for training loops; one process is enough."""

from __future__ import annotations

from unisono.collectives import primitives
from unisono.collectives.arguments import copy_of
from unisono.collectives.types import Group, Op, TensorT
from unisono.comm.work import Work


def reduce_tensor(
    tensor: TensorT, op: Op = "mean", group: Group = None, *, async_op: bool = False
) -> TensorT | Work[TensorT]:
    """`tensor` combined over all ranks of `group` by `op`, on every rank; the input stays as it is.
    With `async_op` a Work is returned, whose `wait()` returns the result.

    Raises what `all_reduce` raises.

    >>> loss = torch.tensor(comm.rank + 1.0)
    >>> unisono.reduce_tensor(loss)  # the mean of 1 and 2
    tensor(1.5000)
    >>> unisono.reduce_tensor(loss, "sum", async_op=True).wait()
    tensor(3.)
    """
    return primitives.all_reduce(copy_of(tensor), op, group, async_op=async_op)


gather_tensor = primitives.gather
broadcast_tensor = primitives.broadcast
