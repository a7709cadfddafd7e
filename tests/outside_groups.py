"""Process groups outside torch's world, created as trainers create them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

_torch: Any = c10d


def outside_group(
    backend: str, store: Any, name: str, rank: int, size: int, timeout_s: float = 30.0
) -> Any:
    """A group with its own rank and size, as created by the helper that OpenRLHF, SGLang and others
    copied from `init_process_group`. `store` is a store, or the path of a file."""
    store = dist.FileStore(store, size) if isinstance(store, str) else store
    group, _ = _torch._new_process_group_helper(
        size,
        rank,
        [],
        dist.Backend(backend),
        dist.PrefixStore(name, store),
        group_name=name,
        timeout=timedelta(seconds=timeout_s),
    )
    _torch._world.pg_group_ranks[group] = {number: number for number in range(size)}
    return group
