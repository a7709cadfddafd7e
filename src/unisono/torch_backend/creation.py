"""What torch calls to make a group of ours, and the cases that raise."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from unisono.comm.communicator import Communicator
from unisono.comm.factory import alone
from unisono.comm.hosts.anywhere import connect
from unisono.comm.meeting.board import Board
from unisono.comm.meeting.deadline import LATECOMERS_S, Deadline
from unisono.comm.meeting.makings import key_of, making
from unisono.comm.shared_memory.memory_transport import SharedMemory
from unisono.comm.transport import Transport
from unisono.errors import GroupError, GroupsDiffer, UnisonoError
from unisono.failures import load_soon, shorten_uncaught
from unisono.torch_backend.autoload import NAME
from unisono.torch_backend.process_group import HAS_PYTHON_BACKENDS, UnisonoProcessGroup, our_group
from unisono.torch_support import NEWEST_TRIED_TORCH, OLDEST_TORCH, is_newer


def create(options: Any, over: Any) -> Any:
    """What torch calls, on members only, to make a group: returns a process group of ours, or a
    Backend if another backend serves other devices. If the backend's options are a Communicator
    (`make_default_group`, `torch_groups.group_over`), the group is made over that one."""
    shorten_uncaught()
    given = _given_to_torch()
    is_one_of_many = _check_torch(options.group_rank, options.global_ranks_in_group, given)
    if getattr(options, "enable_reconfigure", False):
        raise UnisonoError(
            "a group of unisono cannot be reconfigured: leave out enable_reconfigure, and call "
            "comm.shrink(), comm.grow() and unisono.set_world (docs/going-on.md)"
        )
    ready = isinstance(over, Communicator)
    comm, store = (over, options.store) if ready else _connect(options, given)
    if is_one_of_many:
        from unisono.torch_backend.backend import UnisonoBackend

        return UnisonoBackend(UnisonoProcessGroup(comm, store))
    return group_over(comm, store)


def _connect(options: Any, given: Mapping[str, Any]) -> tuple[Communicator, Any]:
    """Meet the other members: returns their Communicator and their part of the store. A group
    outside the world, which trainers make with torch's own helper, has no global ranks, and its
    members need not be in this world or on its hosts."""
    rank, size = options.group_rank, options.group_size
    timeout_s = options.timeout.total_seconds()
    is_default = not dist.is_initialized() and given.get("group_desc") in (None, "default_pg")
    in_world = is_default or bool(options.global_ranks_in_group)  # the default group has none
    ranks = tuple(options.global_ranks_in_group) or tuple(range(size))
    described = given.get("group_desc") not in (None, "", "undefined", "default_pg")
    name = "world" if is_default else str(given["group_desc"] if described else options.group_id)
    store = options.store
    if size == 1:
        return alone(name, ranks if in_world else None, timeout_s), store
    world = _world() if in_world else None
    if world is not None:
        store = dist.PrefixStore(str(options.group_id), dist.group.WORLD.get_group_store())  # type: ignore[attr-defined,union-attr]
    elif in_world:
        from unisono.comm.routing import fresh_part

        store = fresh_part(Board(store, Deadline(timeout_s)), rank, size, name).torch_store()
    end = time.monotonic() + LATECOMERS_S
    doing = f"new_group([{', '.join(map(str, ranks))}])"

    def check() -> None:
        """Wait for the members: raises if one has died, or if the world has ended."""
        error = world.loss_among(ranks, doing) if world is not None else None
        if error is None and world is not None and time.monotonic() > end:
            error = world.ending(doing)
        if error is not None:
            raise error

    check()  # hosts without the dead rank would not notice
    board, stack = Board(store, Deadline(timeout_s), check), contextlib.ExitStack()
    if world is not None:
        unique = f"{options.group_id} of {ranks}"  # ranks with different lists must not meet
        board = board.part(key_of(unique))
        stack.enter_context(making(doing, unique, world, ranks))
    try:
        if world is not None and world.backend == NAME and not world.is_on_one_host:
            from unisono.comm.hosts.hosts_transport import HostsTransport
            from unisono.comm.hosts.making import connect_beside

            assert isinstance(world, HostsTransport)
            return Communicator(connect_beside(world, board, ranks, name, timeout_s)), store
        how: Any = {"name": name, "global_ranks": ranks if in_world else None}
        meet = SharedMemory.connect if world is not None and world.is_on_one_host else connect
        made = meet(board, rank, size, timeout_s=timeout_s, **how)
    except (GroupError, GroupsDiffer):
        raise
    except (RuntimeError, OSError):
        end = 0.0
        for _ in range(50 if world is not None else 0):  # the cause may be known in a moment
            check()
            time.sleep(0.01)
        raise
    finally:
        stack.close()
    return Communicator(made), store


def group_over(comm: Communicator, store: Any) -> UnisonoProcessGroup:
    """A torch process group over a Communicator, with what this torch's hooks need."""
    load_soon("unisono.torch_backend.futures")
    group = UnisonoProcessGroup(comm, store)
    if HAS_PYTHON_BACKENDS:
        from unisono.torch_backend.backend import register_stand_in

        register_stand_in(group)
    return group


def _world() -> Transport | None:
    """The Communicator of torch's default group; None if there is none, or if it is not ours."""
    group = our_group(dist.group.WORLD) if dist.is_initialized() else None
    return None if group is None else group.comm.transport


def make_default_group(comm: Communicator, store: Any) -> None:
    """Make torch's default process group over an existing Communicator."""
    dist.init_process_group(
        NAME,
        store=store,
        rank=comm.rank,
        world_size=comm.size,
        timeout=timedelta(seconds=comm.timeout_s),
        pg_options=comm,
    )


_ALSO_OURS = ("nccl",)
"""Backends allowed beside ours before torch 2.15: a group of ours does what "cpu:unisono,cuda:nccl"
asks for if every rank has its own GPU; if ranks share one, NCCL fails and ours does not."""


def _check_torch(rank: int, ranks: Sequence[int], given: Mapping[str, Any]) -> bool:
    """Raise if this torch cannot make such a group. Returns whether other backends are part of
    it."""
    version = torch.__version__
    if is_newer(OLDEST_TORCH, than=version):
        raise UnisonoError(f"unisono's backend needs torch {OLDEST_TORCH} or later, not {version}")
    if (ranks[rank] if ranks else rank) == 0:  # one rank's warning is enough
        _warn_if_untried(version)
    # The backend of each device: before 2.15 a group of ours replaces all others.
    backends = given.get("backend_config")
    config = dict(backends.get_device_backend_map()) if backends is not None else {}
    others = sorted({name for name in config.values() if name != NAME})
    if HAS_PYTHON_BACKENDS:
        return bool(others)
    others = [name for name in others if name not in _ALSO_OURS]
    if others:
        asked = ",".join(f"{device}:{name}" for device, name in config.items())
        raise UnisonoError(
            f'"{asked}": a group of unisono serves tensors of all devices, and uses NCCL if every '
            f'rank has its own GPU. Use "{NAME}", or make the default group '
            f'with "{others[0]}" and one for CPU tensors with new_group(backend="{NAME}"), or '
            "install torch 2.15"
        )
    return False


@functools.cache
def _warn_if_untried(version: str) -> None:
    if is_newer(version, than=NEWEST_TRIED_TORCH):
        warnings.warn(
            f"torch {version} is newer than the versions that unisono was tested with (up to "
            f"{NEWEST_TRIED_TORCH}): if something fails, install a newer unisono or an older torch",
            stacklevel=2,
        )


def _given_to_torch() -> Mapping[str, Any]:
    """Arguments of torch's group-making function that it does not pass to backends."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_new_process_group_helper":
        frame = frame.f_back  # type: ignore[assignment]
    return frame.f_locals if frame is not None else {}
