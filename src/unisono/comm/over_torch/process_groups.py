"""Groups of torch.distributed that only their members make, in any order: torch names groups by
counting, so that ranks which made different groups before do not find each other; here the
caller passes the name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from unisono.errors import UnisonoError

_torch: Any = c10d  # its stubs have none of these names


def world() -> Any | None:
    return dist.group.WORLD if dist.is_initialized() else None


def default_store() -> Any:
    """The store in which the ranks of torch's default group met."""
    return _torch._world.pg_map[dist.group.WORLD][1]


def exists(group: Any) -> bool:
    return group in _torch._world.pg_map


def new_group(like: Any, ranks: Sequence[int], name: str, timeout_s: float | None = None) -> Any:
    """A torch process group on the backend of the group `like`, of these global ranks in this
    order. Only its members call it, with the same name, which no other group may have had."""
    if not exists(like):
        raise UnisonoError("torch.distributed does not know this group, so it cannot be split")
    backend = _torch._world.pg_map[like][0]
    if backend == dist.Backend.MPI:
        raise UnisonoError(
            "all ranks make torch's MPI groups together: make this one with "
            "torch.distributed.new_group, or start torch.distributed with another backend"
        )
    return make_group(backend, ranks, name, timeout_s=timeout_s)


def destroy(group: Any) -> None:
    """Destroy a group, unless it was already destroyed, perhaps with torch's world."""
    if exists(group):
        dist.destroy_process_group(group)


def make_group(
    backend: str,
    ranks: Sequence[int],
    name: str,
    made: Any = None,
    timeout_s: float | None = None,
) -> Any:
    """A torch process group of these global ranks; over the Communicator `made`, if given."""
    timeout = _torch._get_default_timeout(dist.Backend(backend))
    if timeout_s is not None:
        timeout = type(timeout)(seconds=timeout_s)
    group, _ = _torch._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        list(ranks),
        dist.Backend(backend),
        default_store(),
        name,
        backend_options=made,
        timeout=timeout,
    )
    _torch._world.pg_group_ranks[group] = {rank: number for number, rank in enumerate(ranks)}
    return group
