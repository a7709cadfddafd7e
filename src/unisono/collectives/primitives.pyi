# Written by tools/write_overloads.py from the module beside it.

from collections.abc import Sequence
from typing import Literal as _Literal
from typing import overload as _overload

from unisono.collectives.types import Op, OutT, Rank, StructureT, TensorT
from unisono.comm.communicator import Algorithm, Group
from unisono.comm.tensors import Tensor, Tensors
from unisono.comm.work import Work

@_overload
def all_reduce(
    tensor: StructureT,
    op: Op = "sum",
    group: Group = None,
    *,
    out: StructureT | None = None,
    async_op: _Literal[False] = False,
    algorithm: Algorithm = None,
    reproducible: bool | None = None,
) -> StructureT: ...
@_overload
def all_reduce(
    tensor: StructureT,
    op: Op = "sum",
    group: Group = None,
    *,
    out: StructureT | None = None,
    async_op: _Literal[True],
    algorithm: Algorithm = None,
    reproducible: bool | None = None,
) -> Work[StructureT]: ...
@_overload
def all_reduce(
    tensor: StructureT,
    op: Op = "sum",
    group: Group = None,
    *,
    out: StructureT | None = None,
    async_op: bool,
    algorithm: Algorithm = None,
    reproducible: bool | None = None,
) -> StructureT | Work[StructureT]: ...
@_overload
def reduce(
    tensor: TensorT,
    dst: Rank = None,
    op: Op = "sum",
    group: Group = None,
    *,
    root: Rank = None,
    out: TensorT | None = None,
    async_op: _Literal[False] = False,
    reproducible: bool | None = None,
) -> TensorT | None: ...
@_overload
def reduce(
    tensor: TensorT,
    dst: Rank = None,
    op: Op = "sum",
    group: Group = None,
    *,
    root: Rank = None,
    out: TensorT | None = None,
    async_op: _Literal[True],
    reproducible: bool | None = None,
) -> Work[TensorT | None]: ...
@_overload
def reduce(
    tensor: TensorT,
    dst: Rank = None,
    op: Op = "sum",
    group: Group = None,
    *,
    root: Rank = None,
    out: TensorT | None = None,
    async_op: bool,
    reproducible: bool | None = None,
) -> TensorT | Work[TensorT | None] | None: ...
@_overload
def broadcast(
    tensor: StructureT,
    src: Rank = None,
    group: Group = None,
    *,
    root: Rank = None,
    async_op: _Literal[False] = False,
) -> StructureT: ...
@_overload
def broadcast(
    tensor: StructureT,
    src: Rank = None,
    group: Group = None,
    *,
    root: Rank = None,
    async_op: _Literal[True],
) -> Work[StructureT]: ...
@_overload
def broadcast(
    tensor: StructureT, src: Rank = None, group: Group = None, *, root: Rank = None, async_op: bool
) -> StructureT | Work[StructureT]: ...
@_overload
def all_gather(
    tensor: TensorT, group: Group = None, *, out: None = None, async_op: _Literal[False] = False
) -> list[TensorT]: ...
@_overload
def all_gather(
    tensor: TensorT, group: Group = None, *, out: None = None, async_op: _Literal[True]
) -> Work[list[TensorT]]: ...
@_overload
def all_gather(
    tensor: TensorT, group: Group = None, *, out: None = None, async_op: bool
) -> list[TensorT] | Work[list[TensorT]]: ...
@_overload
def all_gather(
    tensor: Tensor, group: Group = None, *, out: OutT, async_op: _Literal[False] = False
) -> OutT: ...
@_overload
def all_gather(
    tensor: Tensor, group: Group = None, *, out: OutT, async_op: _Literal[True]
) -> Work[OutT]: ...
@_overload
def all_gather(
    tensor: Tensor, group: Group = None, *, out: OutT, async_op: bool
) -> OutT | Work[OutT]: ...
@_overload
def gather(
    tensor: TensorT,
    dst: Rank = None,
    group: Group = None,
    *,
    root: Rank = None,
    out: Tensors | None = None,
    async_op: _Literal[False] = False,
) -> list[TensorT] | None: ...
@_overload
def gather(
    tensor: TensorT,
    dst: Rank = None,
    group: Group = None,
    *,
    root: Rank = None,
    out: Tensors | None = None,
    async_op: _Literal[True],
) -> Work[list[TensorT] | None]: ...
@_overload
def gather(
    tensor: TensorT,
    dst: Rank = None,
    group: Group = None,
    *,
    root: Rank = None,
    out: Tensors | None = None,
    async_op: bool,
) -> list[TensorT] | Work[list[TensorT] | None] | None: ...
@_overload
def scatter(
    tensors: TensorT | Sequence[TensorT] | None = None,
    src: Rank = None,
    group: Group = None,
    *,
    root: Rank = None,
    out: TensorT | None = None,
    async_op: _Literal[False] = False,
) -> TensorT: ...
@_overload
def scatter(
    tensors: TensorT | Sequence[TensorT] | None = None,
    src: Rank = None,
    group: Group = None,
    *,
    root: Rank = None,
    out: TensorT | None = None,
    async_op: _Literal[True],
) -> Work[TensorT]: ...
@_overload
def scatter(
    tensors: TensorT | Sequence[TensorT] | None = None,
    src: Rank = None,
    group: Group = None,
    *,
    root: Rank = None,
    out: TensorT | None = None,
    async_op: bool,
) -> TensorT | Work[TensorT]: ...
@_overload
def reduce_scatter(
    tensors: TensorT | Sequence[TensorT],
    op: Op = "sum",
    group: Group = None,
    *,
    out: TensorT | None = None,
    async_op: _Literal[False] = False,
    reproducible: bool | None = None,
) -> TensorT: ...
@_overload
def reduce_scatter(
    tensors: TensorT | Sequence[TensorT],
    op: Op = "sum",
    group: Group = None,
    *,
    out: TensorT | None = None,
    async_op: _Literal[True],
    reproducible: bool | None = None,
) -> Work[TensorT]: ...
@_overload
def reduce_scatter(
    tensors: TensorT | Sequence[TensorT],
    op: Op = "sum",
    group: Group = None,
    *,
    out: TensorT | None = None,
    async_op: bool,
    reproducible: bool | None = None,
) -> TensorT | Work[TensorT]: ...
@_overload
def all_to_all(
    tensors: TensorT,
    group: Group = None,
    *,
    out: TensorT | None = None,
    async_op: _Literal[False] = False,
) -> TensorT: ...
@_overload
def all_to_all(
    tensors: TensorT, group: Group = None, *, out: TensorT | None = None, async_op: _Literal[True]
) -> Work[TensorT]: ...
@_overload
def all_to_all(
    tensors: TensorT, group: Group = None, *, out: TensorT | None = None, async_op: bool
) -> TensorT | Work[TensorT]: ...
@_overload
def all_to_all(
    tensors: Sequence[TensorT],
    group: Group = None,
    *,
    out: Sequence[TensorT] | None = None,
    async_op: _Literal[False] = False,
) -> list[TensorT]: ...
@_overload
def all_to_all(
    tensors: Sequence[TensorT],
    group: Group = None,
    *,
    out: Sequence[TensorT] | None = None,
    async_op: _Literal[True],
) -> Work[list[TensorT]]: ...
@_overload
def all_to_all(
    tensors: Sequence[TensorT],
    group: Group = None,
    *,
    out: Sequence[TensorT] | None = None,
    async_op: bool,
) -> list[TensorT] | Work[list[TensorT]]: ...
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

gather_tensor = gather
broadcast_tensor = broadcast
