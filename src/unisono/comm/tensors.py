"""Tensors and arrays: their types for signatures, their elements and dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy
    import torch

Array: TypeAlias = "numpy.ndarray[Any, Any]"
Tensor: TypeAlias = "torch.Tensor | numpy.ndarray[Any, Any]"
Tensors: TypeAlias = "Tensor | Sequence[Tensor]"


def count(tensor: Any) -> int:
    return int(tensor.numel() if hasattr(tensor, "numel") else tensor.size)


def dtype_name(tensor: Any) -> str:
    """The dtype of a tensor or array by name, the same for torch and NumPy."""
    return name_of_dtype(getattr(tensor, "dtype", "no dtype"))


@lru_cache(maxsize=256)
def name_of_dtype(dtype: Any) -> str:
    """A dtype by name; cached, since lists of tensors need many and torch is slow here."""
    return str(dtype).removeprefix("torch.")


def gpu_of(tensors: Any, depth: int = 2) -> torch.device | None:
    """The GPU of the first tensor on one, in a list or a list of lists."""
    if isinstance(tensors, (list, tuple)):
        given = tensors if depth else ()
        return next(filter(None, (gpu_of(tensor, depth - 1) for tensor in given)), None)
    device = getattr(tensors, "device", None)
    return device if getattr(device, "type", "cpu") == "cuda" else None


def address_of(tensor: Any) -> int:
    """The address of the first element of a tensor or array. Raises TypeError if it is neither."""
    if hasattr(tensor, "data_ptr"):
        return int(tensor.data_ptr())
    if hasattr(tensor, "__array_interface__"):
        return int(tensor.__array_interface__["data"][0])
    raise TypeError(f"{type(tensor).__name__} is neither a tensor nor an array")
