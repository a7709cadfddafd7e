"""One decision for all ranks: a program in which ranks decide differently hangs or diverges.

Every member of `group` (None: the world) makes the same call; in one process all of them work, too.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from operator import index
from typing import Any, SupportsIndex

import numpy
import torch

from unisono.collectives.integers import device_of
from unisono.collectives.objects import broadcast_object
from unisono.collectives.primitives import all_reduce
from unisono.errors import GroupError, UnisonoError
from unisono.world.world import resolve


def agree(value: Any, src: int = 0, group: Any = None) -> Any:
    """Rank `src`'s value, on every rank; what the others pass is ignored.

    It travels as plain data and arrives as it was: a learning rate keeps all its digits. Raises
    TypeError on every rank where it is not plain data (see `unisono.broadcast_object`).
    """
    return broadcast_object(value, src, group)


def any_rank(flag: object, group: Any = None) -> bool:
    """Whether the flag is true on any rank; the same answer on every rank."""
    return _vote(flag, "max", group)


def all_ranks(flag: object, group: Any = None) -> bool:
    """Whether the flag is true on all ranks; the same answer on every rank."""
    return _vote(flag, "min", group)


def _vote(flag: object, op: str, group: Any) -> bool:
    comm = resolve(group)
    vote = torch.tensor([bool(flag)], dtype=torch.uint8, device=device_of(comm))
    return bool(all_reduce(vote, op, comm))


def sync_seed(seed: SupportsIndex | None = None, group: Any = None) -> int:
    """Seed torch, NumPy and random with the same number on every rank, and return it.

    It is rank 0's seed; where rank 0 passes None, a new one. Ranks that are to draw different
    numbers, for dropout say, go on with `torch.manual_seed(seed + rank)`.

    Raises ValueError on every rank if rank 0's seed is not a whole number from 0 to 2**63 - 1.
    """
    comm = resolve(group)
    if comm.rank == 0 and seed is None:
        seed = secrets.randbits(32)
    if comm.rank == 0 and isinstance(seed, SupportsIndex) and not isinstance(seed, bool):
        agreed = agree(index(seed), 0, comm)  # NumPy's whole numbers, too
    else:
        agreed = agree(repr(seed), 0, comm)  # the others are to hear of a bad one, too
    if not isinstance(agreed, int) or not 0 <= agreed < 2**63:
        raise ValueError(f"rank 0's seed is not a whole number from 0 to 2**63 - 1: {agreed}")
    random.seed(agreed)
    numpy.random.seed(agreed % 2**32)  # NumPy takes 32 bits
    torch.manual_seed(agreed)
    return agreed


@contextmanager
def main_process_first(group: Any = None) -> Iterator[None]:
    """A block that rank 0 runs first, and the others once it has: to download, unpack or save.

        with main_process_first():
            data = load_or_prepare(path)  # rank 0 prepares, the others find it done

    If the block fails on rank 0, every rank raises: rank 0 its own exception, the others
    UnisonoError with its text, and none of them runs the block. The block itself must not
    communicate. The others wait as long as the group's deadline lets them.
    """
    comm = resolve(group)
    if comm.rank != 0:
        failure = broadcast_object(None, 0, comm)
        if failure is not None:
            raise UnisonoError(
                f"rank 0 of group {comm.name} failed in the block that it was to run first: "
                f"{failure}"
            )
        yield
        return
    try:
        yield
    except Exception as error:
        with suppress(GroupError):  # what went wrong first matters more
            broadcast_object(f"{type(error).__name__}: {error}", 0, comm)
        raise
    broadcast_object(None, 0, comm)
