"""One decision for all ranks: a program whose ranks decide differently hangs or diverges.

Every member of `group` (None: the world) makes the same call; in one process the calls work, too.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from operator import index
from typing import Any, Literal, SupportsIndex

import numpy
import torch

from unisono.collectives.objects import broadcast_object
from unisono.collectives.primitives import all_reduce
from unisono.collectives.ragged import device_of
from unisono.comm.communicator import Group
from unisono.errors import GroupError, UnisonoError
from unisono.world.world import resolve


def any_rank(flag: object, group: Group = None) -> bool:
    """Whether the `flag` is true on any rank of `group` (None: the world); the same answer on every
    rank. Raises a GroupError if a rank does not call it. Cost: an all_reduce of one byte. See also
    `all_ranks`.

    >>> unisono.training.any_rank(comm.rank == 1)
    True
    """
    return _vote(flag, "max", group)


def all_ranks(flag: object, group: Group = None) -> bool:
    """Whether the `flag` is true on all ranks of `group` (None: the world); the same answer on
    every rank. Raises a GroupError if a rank does not call it. Cost: an all_reduce of one byte. See
    also `any_rank`.

    >>> unisono.training.all_ranks(comm.rank == 1)
    False
    """
    return _vote(flag, "min", group)


def _vote(flag: object, op: Literal["min", "max"], group: Any) -> bool:
    comm = resolve(group)
    vote = torch.tensor([bool(flag)], dtype=torch.uint8, device=device_of(comm))
    return bool(all_reduce(vote, op, comm))


def sync_seed(seed: SupportsIndex | None = None, group: Group = None) -> int:
    """Seed torch, NumPy and random with the same number on every rank of `group` (None: the world),
    and return it.

    It is rank 0's `seed`, or a new one if rank 0 passes None. If ranks need different random
    numbers, for dropout for example, call `torch.manual_seed(seed + rank)` next.

    Raises ValueError on every rank if rank 0's seed is not a whole number from 0 to 2**63 - 1.
    Cost: that of `broadcast_object`.

    >>> unisono.training.sync_seed(17 if comm.rank == 0 else None)
    17
    """
    comm = resolve(group)
    if comm.rank == 0 and seed is None:
        seed = secrets.randbits(32)
    if comm.rank == 0 and isinstance(seed, SupportsIndex) and not isinstance(seed, bool):
        agreed = broadcast_object(index(seed), 0, comm)  # NumPy's integers, too
    else:
        agreed = broadcast_object(repr(seed), 0, comm)  # the others must learn of an invalid one
    if not isinstance(agreed, int) or not 0 <= agreed < 2**63:
        raise ValueError(f"rank 0's seed must be a whole number from 0 to 2**63 - 1, not {agreed}")
    random.seed(agreed)
    numpy.random.seed(agreed % 2**32)  # NumPy takes 32 bits
    torch.manual_seed(agreed)
    return agreed


@contextmanager
def main_process_first(group: Group = None) -> Iterator[None]:
    """A block that rank 0 of `group` (None: the world) runs first, and the other ranks after it: to
    download, unpack or save.

    Raises, if the block fails on rank 0, on every rank: rank 0 its own exception, the others
    UnisonoError with its text, and none of them runs the block. The block must not communicate. The
    others wait up to the group's timeout. Cost: that of `broadcast_object`.

    >>> import os, tempfile
    >>> folder = unisono.broadcast_object(tempfile.mkdtemp() if comm.rank == 0 else None)
    >>> with unisono.training.main_process_first():
    ...     path = os.path.join(folder, "data")
    ...     if not os.path.exists(path):
    ...         assert comm.rank == 0
    ...         open(path, "w").close()
    """
    comm = resolve(group)
    if comm.rank != 0:
        failure = broadcast_object(None, 0, comm)
        if failure is not None:
            raise UnisonoError(
                f"rank 0 of group {comm.name} failed in the block that it runs first: {failure}"
            )
        yield
        return
    try:
        yield
    except Exception as error:
        with suppress(GroupError):  # the first error matters more
            broadcast_object(f"{type(error).__name__}: {error}", 0, comm)
        raise
    broadcast_object(None, 0, comm)
