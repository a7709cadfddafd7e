"""The solo make of the Communicator: one rank, alone, by the same rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from unisono.comm.base import DEFAULT_TIMEOUT_S, REDUCTIONS, Communicator, Op, PremulSum
from unisono.errors import GroupClosed

if TYPE_CHECKING:
    from unisono.comm.base import Tensor, Tensors


class SoloCommunicator(Communicator):
    """A group of one. Needs no engine and no other process; refuses what the others refuse."""

    def __init__(
        self,
        name: str = "world",
        global_ranks: tuple[int, ...] = (0,),
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self.rank = 0
        self.size = 1
        self.name = name
        self.global_ranks = global_ranks
        self.timeout_s = timeout_s
        self._open = True
        self._splits = 0

    def all_reduce(self, tensor: Tensors, op: Op = "sum") -> None:
        self._reduce("all_reduce", _many(tensor), op)

    def reduce(self, tensor: Tensors, root: int = 0, op: Op = "sum") -> None:
        self._check("reduce", root)
        self._reduce("reduce", _many(tensor), op)

    def broadcast(self, tensor: Tensors, root: int = 0) -> None:
        self._check("broadcast", root)

    def all_gather(self, output: Tensors, input: Tensors) -> None:
        self._copy("all_gather", output, input)

    def reduce_scatter(self, output: Tensors, input: Tensors, op: Op = "sum") -> None:
        self._copy("reduce_scatter", output, input)
        self._reduce("reduce_scatter", _many(output), op)

    def gather(self, output: Tensors | None, input: Tensor, root: int = 0) -> None:
        self._check("gather", root)
        if output is None:
            raise ValueError(f"gather on group {self.name}: the root must pass an output")
        self._copy("gather", output, input)

    def scatter(self, output: Tensor, input: Tensors | None, root: int = 0) -> None:
        self._check("scatter", root)
        if input is None:
            raise ValueError(f"scatter on group {self.name}: the root must pass an input")
        self._copy("scatter", output, input)

    def all_to_all(self, output: Tensors, input: Tensors) -> None:
        self._copy("all_to_all", output, input)

    def barrier(self) -> None:
        self._check("barrier")

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        self._check("split")
        if tuple(ranks) != (0,):
            raise ValueError(f"ranks {tuple(ranks)} do not all lie in a group of 1")
        self._splits += 1
        name = f"{self.name}[0]" + (f"/{self._splits}" if self._splits > 1 else "")
        return SoloCommunicator(name, self.global_ranks or (0,), self.timeout_s)

    def close(self) -> None:
        self._open = False

    def _check(self, what: str, root: int = 0) -> None:
        if not self._open:
            raise GroupClosed(f"group {self.name} is closed", rank=0, group=self.name)
        if root != 0:
            raise ValueError(f"{what} on group {self.name}: root {root} is not a rank of 1")

    def _copy(self, what: str, output: Any, input: Any) -> None:
        self._check(what)
        outputs, inputs = _many(output), _many(input)
        if len(outputs) != len(inputs):
            raise ValueError(
                f"{what} on group {self.name}: {len(outputs)} outputs for {len(inputs)} inputs"
            )
        for to, source in zip(outputs, inputs, strict=True):
            if str(to.dtype) != str(source.dtype):
                raise TypeError(f"{what} on group {self.name}: input and output differ in dtype")
            if _count(to) != _count(source):
                raise ValueError(
                    f"{what} on group {self.name}: this rank's part has {_count(source)} elements "
                    f"in the input and {_count(to)} in the output"
                )
        for to, source in zip(outputs, inputs, strict=True):
            to[...] = source.reshape(to.shape)

    def _reduce(self, what: str, tensors: list[Any], op: Op) -> None:
        self._check(what)
        name = "premul_sum" if isinstance(op, PremulSum) else op
        if name not in (*REDUCTIONS, "mean", "premul_sum"):
            raise ValueError(
                f"{what} on group {self.name}: unknown reduction {op!r}: use "
                f"{', '.join(REDUCTIONS)} or PremulSum"
            )
        for tensor in tensors:
            dtype = str(tensor.dtype).removeprefix("torch.")
            if not _has_meaning(name, dtype):
                raise TypeError(f"{what} on group {self.name}: {name} has no meaning for {dtype}")
            if isinstance(op, PremulSum):
                if "int" in dtype and not float(op.factor).is_integer():
                    raise ValueError(
                        f"{what} on group {self.name}: integers cannot be scaled by {op.factor}"
                    )
                tensor *= int(op.factor) if "int" in dtype else op.factor


def _has_meaning(op: str, dtype: str) -> bool:
    """The engine's rule (csrc/reduce.c), by name."""
    if dtype.startswith(("float8", "float4")) or dtype in ("complex32", "float128", "longdouble"):
        return False
    if dtype == "bool":
        return op not in ("avg", "mean", "premul_sum")
    if "int" in dtype:
        return op not in ("avg", "mean")
    if dtype.startswith("complex"):
        return op in ("sum", "avg", "mean", "product", "premul_sum")
    return op not in ("band", "bor", "bxor")


def _many(tensors: Any) -> list[Any]:
    return list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]


def _count(tensor: Any) -> int:
    return int(tensor.numel() if hasattr(tensor, "numel") else tensor.size)
