"""Who else sees a tensor's memory: it must not be changed, or swapped, behind their back."""

from __future__ import annotations

import functools
from typing import Any

import torch

_count_users: Any = getattr(torch._C, "_storage_Use_Count", None)


def shares_storage(tensor: torch.Tensor) -> bool:
    """Whether other tensors lie in the same storage; also True where torch does not tell."""
    if _count_users is None:
        return True
    return bool(_count_users(tensor.untyped_storage()._cdata) > _users_of_a_single_tensor())


@functools.cache
def _users_of_a_single_tensor() -> int:
    fresh = torch.empty(1)
    return int(_count_users(fresh.untyped_storage()._cdata))
