# Written by tools/write_overloads.py from the module beside it.

from typing import Literal as _Literal
from typing import overload as _overload

from unisono.collectives import primitives
from unisono.collectives.types import Group, Op, TensorT
from unisono.comm.work import Work

@_overload
def reduce_tensor(
    tensor: TensorT, op: Op = "mean", group: Group = None, *, async_op: _Literal[False] = False
) -> TensorT: ...
@_overload
def reduce_tensor(
    tensor: TensorT, op: Op = "mean", group: Group = None, *, async_op: _Literal[True]
) -> Work[TensorT]: ...
@_overload
def reduce_tensor(
    tensor: TensorT, op: Op = "mean", group: Group = None, *, async_op: bool
) -> TensorT | Work[TensorT]: ...

gather_tensor = primitives.gather
broadcast_tensor = primitives.broadcast
