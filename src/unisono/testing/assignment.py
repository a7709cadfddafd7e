"""A rank's part in the current test, and the worlds that fixtures make of it."""

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
"""A world's calls time out after this fraction of the test's time limit: the waiting ranks then
name the missing one, and only that rank runs into the limit."""

_CONNECTING_S = 5.0


@dataclass(frozen=True)
class RankAssignment:
    """This rank in one test. `meeting` is the prefix of the files in which the ranks meet, `shared`
    the folder that they share; both are created on demand."""

    rank: int
    size: int
    backend: str
    timeout_s: float
    meeting: str
    shared: str
    sanitize: bool = False

    def files(self) -> list[Path]:
        kinds = ("-comm", "-init", "-store", "-sanitizer")
        return [Path(self.meeting + which) for which in kinds]


ASSIGNMENT = pytest.StashKey[RankAssignment]()
"""The key of the current test's assignment in the config of a rank's session."""


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
            with_torch=False,  # that is what `process_group` is for
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


@contextlib.contextmanager
def sanitized(assignment: RankAssignment) -> Iterator[None]:
    """The test itself, under the sanitizer if the mark says so: a proof fails it."""
    if not assignment.sanitize:
        yield
        return
    require_torch("pytest.mark.ranks(sanitize=True)")
    import torch.distributed as dist

    from unisono import watch

    store = dist.FileStore(assignment.meeting + "-sanitizer", assignment.size)  # type: ignore[attr-defined]
    with watch.sanitized(store, assignment.rank, assignment.size) as proofs:
        yield
    if proofs:
        pytest.fail("\n".join(map(str, proofs)), pytrace=False)


def _await_connections(store: Any, size: int) -> None:
    """Wait until all ranks have connected: gloo takes an early exit for a crash. The wait is short:
    a rank that could not connect has raised its own exception."""
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
    """Close the worlds and groups that a test left open, so that the next test finds none."""
    from unisono.world import world as worlds

    worlds.shutdown()
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available():
        if dist.is_initialized():
            dist.destroy_process_group()
        # torch counts groups to name them, failed ones included
        dist.distributed_c10d._world.group_count = 0
    gc.collect()  # groups that only a reference cycle keeps alive
