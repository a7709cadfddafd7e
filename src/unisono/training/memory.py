"""The memory of tensors: what a group can share, and who else sees it."""

from __future__ import annotations

import functools
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
    """Zeros that all ranks can read in their place, where they can have such memory; all call."""
    if device.type == "cpu":
        try:
            return comm.zeros(length, dtype)
        except SegmentError:  # on every rank: there is not enough
            pass
    return torch.zeros(length, dtype=dtype, device=device)


def shares_storage(tensor: torch.Tensor) -> bool:
    """Whether other tensors lie in the same storage; also True where torch does not tell."""
    if _count_users is None:
        return True
    return bool(_count_users(tensor.untyped_storage()._cdata) > _users_of_a_single_tensor())


@functools.cache
def _users_of_a_single_tensor() -> int:
    fresh = torch.empty(1)
    return int(_count_users(fresh.untyped_storage()._cdata))
