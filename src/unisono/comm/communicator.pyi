# Written by tools/write_overloads.py from the module beside it.

from collections.abc import Sequence
from typing import Any, NoReturn, TypeAlias
from typing import Literal as _Literal
from typing import overload as _overload

from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroup

from unisono.comm.reductions import AnyReduction, WireFormat
from unisono.comm.shared_tensors import SharedTensors
from unisono.comm.tensors import Tensor, Tensors
from unisono.comm.transport import Transport
from unisono.comm.work import Message, Work
from unisono.errors import (
    GroupError,
)
from unisono.plan.schedule import Schedule
from unisono.torch_habits import (
    WithoutTorchNames,
)

Algorithm: TypeAlias = "str | Schedule | None"
Rank: TypeAlias = "int | None"
Contributions: TypeAlias = "Sequence[Tensors] | None"
Group: TypeAlias = "Communicator | ProcessGroup | int | None"

class Communicator(SharedTensors, WithoutTorchNames):
    rank: int
    size: int
    global_ranks: tuple[int, ...] | None
    name: str
    transport: Transport
    backend: str
    def __init__(self, transport: Transport) -> None: ...
    @staticmethod
    def join(
        name: str,
        rank: int | None = None,
        size: int | None = None,
        store: Store | None = None,
        *,
        generation: int = 0,
        timeout_s: float | None = None,
        join_timeout_s: float | None = None,
    ) -> Communicator: ...
    @property
    def timeout_s(self) -> float: ...
    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None: ...
    @property
    def reproducible(self) -> bool: ...
    @reproducible.setter
    def reproducible(self, wanted: bool) -> None: ...
    @property
    def next(self) -> int: ...
    @property
    def prev(self) -> int: ...
    @_overload
    def all_reduce(
        self,
        tensor: Tensors,
        op: AnyReduction = "sum",
        *,
        async_op: _Literal[False] = False,
        algorithm: Algorithm = None,
        reproducible: bool | None = None,
        contributions: Contributions = None,
        wire: WireFormat | None = None,
        residual: Tensor | None = None,
    ) -> None: ...
    @_overload
    def all_reduce(
        self,
        tensor: Tensors,
        op: AnyReduction = "sum",
        *,
        async_op: _Literal[True],
        algorithm: Algorithm = None,
        reproducible: bool | None = None,
        contributions: Contributions = None,
        wire: WireFormat | None = None,
        residual: Tensor | None = None,
    ) -> Work: ...
    @_overload
    def all_reduce(
        self,
        tensor: Tensors,
        op: AnyReduction = "sum",
        *,
        async_op: bool,
        algorithm: Algorithm = None,
        reproducible: bool | None = None,
        contributions: Contributions = None,
        wire: WireFormat | None = None,
        residual: Tensor | None = None,
    ) -> Work | None: ...
    @_overload
    def reduce(
        self,
        tensor: Tensors,
        root: Rank = None,
        op: AnyReduction = "sum",
        *,
        dst: Rank = None,
        async_op: _Literal[False] = False,
        algorithm: Algorithm = None,
        reproducible: bool | None = None,
        contributions: Contributions = None,
    ) -> None: ...
    @_overload
    def reduce(
        self,
        tensor: Tensors,
        root: Rank = None,
        op: AnyReduction = "sum",
        *,
        dst: Rank = None,
        async_op: _Literal[True],
        algorithm: Algorithm = None,
        reproducible: bool | None = None,
        contributions: Contributions = None,
    ) -> Work: ...
    @_overload
    def reduce(
        self,
        tensor: Tensors,
        root: Rank = None,
        op: AnyReduction = "sum",
        *,
        dst: Rank = None,
        async_op: bool,
        algorithm: Algorithm = None,
        reproducible: bool | None = None,
        contributions: Contributions = None,
    ) -> Work | None: ...
    @_overload
    def broadcast(
        self,
        tensor: Tensors,
        root: Rank = None,
        *,
        src: Rank = None,
        async_op: _Literal[False] = False,
        algorithm: Algorithm = None,
    ) -> None: ...
    @_overload
    def broadcast(
        self,
        tensor: Tensors,
        root: Rank = None,
        *,
        src: Rank = None,
        async_op: _Literal[True],
        algorithm: Algorithm = None,
    ) -> Work: ...
    @_overload
    def broadcast(
        self,
        tensor: Tensors,
        root: Rank = None,
        *,
        src: Rank = None,
        async_op: bool,
        algorithm: Algorithm = None,
    ) -> Work | None: ...
    @_overload
    def all_gather(
        self,
        output: Tensors,
        input: Tensors,
        *,
        async_op: _Literal[False] = False,
        algorithm: Algorithm = None,
    ) -> None: ...
    @_overload
    def all_gather(
        self,
        output: Tensors,
        input: Tensors,
        *,
        async_op: _Literal[True],
        algorithm: Algorithm = None,
    ) -> Work: ...
    @_overload
    def all_gather(
        self, output: Tensors, input: Tensors, *, async_op: bool, algorithm: Algorithm = None
    ) -> Work | None: ...
    @_overload
    def reduce_scatter(
        self,
        output: Tensors,
        input: Tensors | None = None,
        op: AnyReduction = "sum",
        *,
        async_op: _Literal[False] = False,
        algorithm: Algorithm = None,
        reproducible: bool | None = None,
        contributions: Contributions = None,
    ) -> None: ...
    @_overload
    def reduce_scatter(
        self,
        output: Tensors,
        input: Tensors | None = None,
        op: AnyReduction = "sum",
        *,
        async_op: _Literal[True],
        algorithm: Algorithm = None,
        reproducible: bool | None = None,
        contributions: Contributions = None,
    ) -> Work: ...
    @_overload
    def reduce_scatter(
        self,
        output: Tensors,
        input: Tensors | None = None,
        op: AnyReduction = "sum",
        *,
        async_op: bool,
        algorithm: Algorithm = None,
        reproducible: bool | None = None,
        contributions: Contributions = None,
    ) -> Work | None: ...
    @_overload
    def gather(
        self,
        output: Tensors | None,
        input: Tensor,
        root: Rank = None,
        *,
        dst: Rank = None,
        async_op: _Literal[False] = False,
    ) -> None: ...
    @_overload
    def gather(
        self,
        output: Tensors | None,
        input: Tensor,
        root: Rank = None,
        *,
        dst: Rank = None,
        async_op: _Literal[True],
    ) -> Work: ...
    @_overload
    def gather(
        self,
        output: Tensors | None,
        input: Tensor,
        root: Rank = None,
        *,
        dst: Rank = None,
        async_op: bool,
    ) -> Work | None: ...
    @_overload
    def scatter(
        self,
        output: Tensor,
        input: Tensors | None = None,
        root: Rank = None,
        *,
        src: Rank = None,
        async_op: _Literal[False] = False,
    ) -> None: ...
    @_overload
    def scatter(
        self,
        output: Tensor,
        input: Tensors | None = None,
        root: Rank = None,
        *,
        src: Rank = None,
        async_op: _Literal[True],
    ) -> Work: ...
    @_overload
    def scatter(
        self,
        output: Tensor,
        input: Tensors | None = None,
        root: Rank = None,
        *,
        src: Rank = None,
        async_op: bool,
    ) -> Work | None: ...
    @_overload
    def all_to_all(
        self,
        output: Tensors,
        input: Tensors,
        *,
        async_op: _Literal[False] = False,
        algorithm: Algorithm = None,
    ) -> None: ...
    @_overload
    def all_to_all(
        self,
        output: Tensors,
        input: Tensors,
        *,
        async_op: _Literal[True],
        algorithm: Algorithm = None,
    ) -> Work: ...
    @_overload
    def all_to_all(
        self, output: Tensors, input: Tensors, *, async_op: bool, algorithm: Algorithm = None
    ) -> Work | None: ...
    @_overload
    def barrier(
        self, *, timeout_s: float | None = None, async_op: _Literal[False] = False
    ) -> None: ...
    @_overload
    def barrier(self, *, timeout_s: float | None = None, async_op: _Literal[True]) -> Work: ...
    @_overload
    def barrier(self, *, timeout_s: float | None = None, async_op: bool) -> Work | None: ...
    def _transport_for(self, operation: str, output: Any, input: Any) -> Transport: ...
    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None: ...
    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> int: ...
    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Work: ...
    def irecv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> Work: ...
    def batch_isend_irecv(self, messages: Sequence[Message]) -> list[Work]: ...
    def _refuse_message(self, what: str, why: Exception, peer: Any, tag: Any) -> NoReturn: ...
    def split(self, ranks: Sequence[int], label: str = "") -> Communicator | None: ...
    def shrink(
        self, *, at_least: int = 1, timeout_s: float | None = None, store: Store | None = None
    ) -> Communicator: ...
    def grow(
        self,
        name: str,
        count: int = 1,
        *,
        store: Store | None = None,
        timeout_s: float | None = None,
    ) -> Communicator: ...
    @property
    def generation(self) -> int: ...
    def reject_call(self, operation: str, why: str) -> NoReturn: ...
    def _refuse_for(self, operation: str, why: Exception) -> NoReturn: ...
    def abort(self, reason: str = "") -> None: ...
    def decide(self, serial: int, value: int) -> int: ...
    @property
    def errored(self) -> GroupError | None: ...
    def close(self) -> None: ...
    def __enter__(self) -> Communicator: ...
    def __exit__(self, *exception: object) -> None: ...
