"""What makes no sense as an argument, said in one sentence: for the makes without an engine.

The rules are csrc/python/tensors.c's and csrc/reduce.c's, which the native make goes by.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from unisono.comm.base import REDUCTIONS, Op, PremulSum, dtype_name, has_meaning, holds
from unisono.comm.overlaps import overlaps_itself

Complaint = tuple[type[Exception] | None, str]
"""The kind of exception and its text; no kind where all is well."""


def reduction_complaint(op: Op, tensors: list[Any]) -> Complaint:
    """What is wrong with reducing these tensors by `op`, if anything."""
    name = "premul_sum" if isinstance(op, PremulSum) else op
    if name not in (*REDUCTIONS, "mean", "premul_sum"):
        return ValueError, f"unknown reduction {op!r}: use {', '.join(REDUCTIONS)} or PremulSum"
    for tensor in tensors:
        dtype = dtype_name(tensor)
        if not has_meaning(name, dtype):
            return TypeError, f"{name} has no meaning for {dtype}"
        if isinstance(op, PremulSum):
            try:
                factor = float(op.factor)
            except (TypeError, ValueError):
                return ValueError, f"the factor {op.factor!r} is no number"
            if not holds(dtype, factor):
                return ValueError, f"{dtype} cannot be scaled by {factor}"
    return None, ""


def complaint(tensor: Any, writable: bool, devices: Collection[str]) -> Complaint:
    """What is wrong with a tensor that shall lie on one of these devices, if anything."""
    if hasattr(tensor, "layout") and hasattr(tensor, "device"):
        return _torch_complaint(tensor, writable, devices)
    if not hasattr(tensor, "__array_interface__"):
        return TypeError, f"{type(tensor).__name__} is neither a tensor nor an array"
    if "cpu" not in devices:
        return TypeError, f"an array lies in the CPU's memory: pass a tensor on {_either(devices)}"
    if tensor.dtype.kind not in "biufc" or not tensor.dtype.isnative:
        return TypeError, f"{tensor.dtype} elements are not plain numbers"
    if hasattr(tensor, "mask"):
        return TypeError, _MASKED
    if writable and not tensor.flags.writeable:
        return ValueError, "a read-only array cannot receive a result"
    return (ValueError, _OVERLAPPING) if writable and overlaps_itself(tensor) else (None, "")


def _torch_complaint(tensor: Any, writable: bool, devices: Collection[str]) -> Complaint:
    import torch

    dtype = dtype_name(tensor)
    plain = tensor.layout is torch.strided and tensor.device.type in devices
    odd = tensor.is_nested or tensor.is_quantized or tensor._is_zerotensor()
    if not plain or odd or dtype.startswith("bits"):
        return TypeError, _without_memory(tensor, devices)
    if tensor.is_conj() or tensor.is_neg():
        return TypeError, "a lazy conjugate or negative: pass .resolve_conj() or .resolve_neg()"
    try:
        has_bytes, address = tensor.untyped_storage().nbytes(), tensor.data_ptr()
    except RuntimeError:  # one that a transform of functions made
        return TypeError, _without_memory(tensor, devices)
    needs_bytes = _end_in_storage(tensor)
    if needs_bytes > has_bytes and type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return ValueError, (
            f"a tensor that ends at byte {needs_bytes} has a storage of {has_bytes}, which "
            "somebody resized: resize it back, or pass another tensor"
        )
    if needs_bytes > has_bytes or (needs_bytes and not address):  # one that wraps others
        return TypeError, _without_memory(tensor, devices)
    return (ValueError, _OVERLAPPING) if writable and overlaps_itself(tensor) else (None, "")


def _without_memory(tensor: Any, devices: Collection[str]) -> str:
    return (
        f"a {type(tensor).__name__} of {dtype_name(tensor)}, {tensor.layout} on device "
        f"{tensor.device} has no plain memory to share: pass a dense tensor on {_either(devices)}"
    )


_MASKED = "a masked array's hidden elements would count: pass .filled(...) or .data"

_OVERLAPPING = (
    "an expanded or overlapping tensor cannot receive a result: several of its elements share one "
    "place in memory; pass a .clone()"
)


def _end_in_storage(tensor: Any) -> int:
    """Where in its storage a tensor ends."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((length - 1) * step for length, step in steps)
    return int(last + 1) * int(tensor.element_size())


def count(tensor: Any) -> int:
    """How many elements a tensor or array has."""
    return int(tensor.numel() if hasattr(tensor, "numel") else tensor.size)


def _either(devices: Collection[str]) -> str:
    return " or ".join(devices)
