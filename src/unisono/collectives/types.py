"""What the functions take and return, for type checkers: tensor in, tensor out."""

from collections.abc import Mapping, Sequence
from dataclasses import Field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

import torch

from unisono.comm.communicator import Algorithm, Group, Rank
from unisono.comm.reductions import AnyReduction as Op
from unisono.comm.tensors import Tensor, Tensors

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # typing.TypeVar has defaults only from Python 3.13
else:
    from typing import TypeVar as _TypeVar

    def TypeVar(name: str, *, bound: Any, default: Any = None) -> Any:
        return _TypeVar(name, bound=bound)


__all__ = [
    "Algorithm", "Group", "Op", "OutT", "Rank", "StructureT", "Tensor", "TensorT", "Tensors",
]  # fmt: skip


class Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


Structure: TypeAlias = (
    "Tensor | complex | Mapping[Any, object] | Sequence[object] | Dataclass | None"
)
"""A tensor, a number, or a structure of them; not a Work."""

TensorT = TypeVar("TensorT", bound="Tensor", default=torch.Tensor)
StructureT = TypeVar("StructureT", bound="Structure")
OutT = TypeVar("OutT", bound="Tensors")
