"""Reducing, gathering and broadcasting one tensor, for training loops; one process is enough."""

from __future__ import annotations

from typing import Any, overload

from unisono.collectives import primitives
from unisono.collectives.arguments import copy_of
from unisono.collectives.types import Group, No, Op, TensorT, Yes
from unisono.comm.base import Work


@overload
def reduce_tensor(
    tensor: TensorT, op: Op = "mean", group: Group = None, *, async_op: No = False
) -> TensorT: ...
@overload
def reduce_tensor(
    tensor: TensorT, op: Op = "mean", group: Group = None, *, async_op: Yes
) -> Work[TensorT]: ...
@overload
def reduce_tensor(
    tensor: TensorT, op: Op = "mean", group: Group = None, *, async_op: bool
) -> TensorT | Work[TensorT]: ...
def reduce_tensor(
    tensor: Any, op: Any = "mean", group: Any = None, *, async_op: bool = False
) -> Any:
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
