"""Memory that a group shares, and tensors that share storage."""

import functools
from collections.abc import Iterable
from typing import Any

import torch

from unisono.comm.communicator import Communicator
from unisono.errors import SegmentError
from unisono.torch_autograd import outlasting_inference_mode

_count_users: Any = getattr(torch._C, "_storage_Use_Count", None)


@outlasting_inference_mode()
def zeros_for(
    comm: Communicator, length: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Zeros in memory that all ranks have mapped, if there is any; all ranks call it."""
    if device.type == "cpu":
        try:
            return comm.zeros(length, dtype)
        except SegmentError:  # raised on every rank: not enough memory
            pass
    return torch.zeros(length, dtype=dtype, device=device)


def views_of(flat: torch.Tensor, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Views of a flat tensor, one after the other, in the shapes of these."""
    views, begin = [], 0
    for tensor in tensors:
        views.append(flat[begin : begin + tensor.numel()].view(tensor.shape))
        begin += tensor.numel()
    return views


def shares_storage(tensor: torch.Tensor) -> bool:
    """Whether other tensors use the same storage; also True if torch does not say."""
    if _count_users is None:
        return True
    return bool(_count_users(tensor.untyped_storage()._cdata) > _users_of_a_single_tensor())


@functools.cache
def _users_of_a_single_tensor() -> int:
    fresh = torch.empty(1)
    return int(_count_users(fresh.untyped_storage()._cdata))
