"""Names that torch 2.13 introduced, on every torch, and marks for tests of new features."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

_IS_NEW = hasattr(dist, "all_gather_single")

since_2_13 = pytest.mark.skipif(not _IS_NEW, reason="torch 2.13 brought it")

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _renamed(new: str, old: str):
    return getattr(functional, new, None) or getattr(functional, old)


functional_all_gather = _renamed("all_gather_single", "all_gather_tensor")
functional_reduce_scatter = _renamed("reduce_scatter_single", "reduce_scatter_tensor")
functional_all_gather_coalesced = _renamed(
    "all_gather_single_coalesced", "all_gather_into_tensor_coalesced"
)
functional_reduce_scatter_coalesced = _renamed(
    "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"
)

_HAS_HOOKS = hasattr(torch._C._distributed_c10d, "FlightRecorderHook")
since_2_15 = pytest.mark.skipif(not _HAS_HOOKS, reason="torch 2.15 brought it")
before_2_15 = pytest.mark.skipif(_HAS_HOOKS, reason="torch 2.15 can do it")
