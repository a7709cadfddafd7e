"""A rank's assignment in the test at hand, and the worlds that fixtures make of it."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from unisono.testing.mark import BadMark
from unisono.torch_backend.autoload import backend_problem
from unisono.torch_support import require_torch

if TYPE_CHECKING:
    import torch.distributed

    from unisono.comm.communicator import Communicator

_PATIENCE = 0.5
"""A world's calls give up after this part of the test's deadline: whoever waits then says for
whom, and only the rank that it waited for is left to the deadline."""

_CONNECTING_S = 5.0


@dataclass(frozen=True)
class RankAssignment:
    """This rank in one test. `meeting` begins the names of the files by which the ranks meet,
    `shared` is the folder that they share; neither exists before it is needed."""

    rank: int
    size: int
    backend: str
    timeout_s: float
    meeting: str
    shared: str

    def files(self) -> list[Path]:
        return [Path(self.meeting + which) for which in ("-comm", "-init", "-store")]


ASSIGNMENT = pytest.StashKey[RankAssignment]()
"""Where a rank's session keeps the assignment in the test at hand, in its config."""


@contextlib.contextmanager
def world(assignment: RankAssignment) -> Iterator[Communicator]:
    """A fresh world of the test's ranks, as by `unisono.init()`."""
    from unisono.world import world as worlds

    try:
        yield worlds.init(
            rank=assignment.rank,
            size=assignment.size,
            rendezvous=assignment.meeting + "-comm",
            timeout_s=assignment.timeout_s * _PATIENCE,
            backend="unisono",
            with_torch=False,  # `process_group` is for that
        )
    finally:
        worlds.shutdown()


@contextlib.contextmanager
def process_group(assignment: RankAssignment) -> Iterator[torch.distributed.ProcessGroup]:
    """torch's default process group over the test's ranks, with the mark's backend."""
    require_torch("the fixture process_group")
    import torch.distributed as dist

    for part in assignment.backend.split(","):
        if problem := backend_problem(part.rpartition(":")[2].strip().lower()):
            raise BadMark(f"pytest.mark.ranks: {problem}")
    store = dist.FileStore(assignment.meeting + "-store", assignment.size)  # type: ignore[attr-defined]
    dist.init_process_group(
        assignment.backend,
        store=store,
        rank=assignment.rank,
        world_size=assignment.size,
        timeout=timedelta(seconds=assignment.timeout_s * _PATIENCE),
    )
    try:
        _await_connections(store, assignment.size)
        group = dist.group.WORLD
        assert group is not None
        yield group
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _await_connections(store: Any, size: int) -> None:
    """Let nobody leave while others still connect: gloo takes that for a crash. Not for long: a
    rank that could not connect has an exception of its own."""
    end_s = time.monotonic() + _CONNECTING_S
    arrived = store.add("unisono/connected", 1)
    while arrived < size and time.monotonic() < end_s:
        time.sleep(0.001)
        arrived = store.add("unisono/connected", 0)


def set_environment(assignment: RankAssignment) -> None:
    os.environ["UNISONO_RANK"] = str(assignment.rank)
    os.environ["UNISONO_SIZE"] = str(assignment.size)
    os.environ["UNISONO_RENDEZVOUS"] = assignment.meeting + "-init"


def close_groups() -> None:
    """End the worlds and groups that a test has left open, so that the next one finds none."""
    from unisono.world import world as worlds

    worlds.shutdown()
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available():
        if dist.is_initialized():
            dist.destroy_process_group()
        # torch counts groups to name them, those that could not be made, too
        dist.distributed_c10d._world.group_count = 0
    gc.collect()  # groups that only a cycle of objects has kept
