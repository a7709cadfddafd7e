"""What torch calls to make a group of ours, and when we refuse."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from unisono.comm.backend.process_group import NAME, UnisonoProcessGroup
from unisono.comm.base import Communicator
from unisono.comm.native import NativeCommunicator
from unisono.comm.rendezvous import StoreExchange
from unisono.comm.solo import SoloCommunicator
from unisono.errors import UnisonoError

_OLDEST_TORCH = (2, 11)


def create(options: Any, made: Any) -> UnisonoProcessGroup:
    """What torch calls to make a group; on its members only. Where torch passes a Communicator on
    as the backend's options (`make_default_group`, `torch_groups.group_over`), the group is made
    over that one."""
    _check_torch()
    if isinstance(made, Communicator):
        return UnisonoProcessGroup(made, options.store)
    rank, size = options.group_rank, options.group_size
    timeout_s = options.timeout.total_seconds()
    ranks = tuple(options.global_ranks_in_group) or tuple(range(size))
    name = str(options.group_id) if dist.is_initialized() else "world"
    comm: Communicator
    if size == 1:
        comm = SoloCommunicator(name, ranks, timeout_s)
    else:
        comm = NativeCommunicator.connect(
            StoreExchange(options.store),
            rank,
            size,
            name=name,
            global_ranks=ranks,
            timeout_s=timeout_s,
            join_timeout_s=timeout_s,
        )
    return UnisonoProcessGroup(comm, options.store)


def make_default_group(comm: Communicator, store: Any) -> None:
    """Make torch's default process group over a Communicator of ours that is there already."""
    dist.init_process_group(
        NAME,
        store=store,
        rank=comm.rank,
        world_size=comm.size,
        timeout=timedelta(seconds=comm.timeout_s),
        pg_options=comm,
    )


def _check_torch() -> None:
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < _OLDEST_TORCH:
        raise UnisonoError(f"unisono's backend needs torch 2.11 or later, not {torch.__version__}")
    config = _asked_for()
    others = sorted({name for name in config.values() if name != NAME})
    if others:
        asked = ",".join(f"{device}:{name}" for device, name in config.items())
        raise UnisonoError(
            f'"{asked}": a group of unisono serves CPU tensors alone. Make the default group with '
            f'"{others[0]}", and one for CPU tensors with new_group(backend="{NAME}")'
        )


def _asked_for() -> dict[str, str]:
    """Which backend each device shall have. torch does not tell its backends, but a group of ours
    takes the place of all others: look at the function that makes the group."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_new_process_group_helper":
        frame = frame.f_back  # type: ignore[assignment]
    config = frame.f_locals.get("backend_config") if frame is not None else None
    return dict(config.get_device_backend_map()) if config is not None else {}
