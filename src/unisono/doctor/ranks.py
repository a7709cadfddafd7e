"""The self-test on real ranks: new processes of this machine, one backend after the other."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from datetime import timedelta

from unisono.doctor.selftest.results import SelfTest
from unisono.doctor.selftest.run import debug_communication
from unisono.environment import read_rank_info
from unisono.errors import RanksFailed, RanksTimedOut, TorchMissing, UnisonoError
from unisono.launcher.functions import launch
from unisono.world.world import resolve

CALL_S = 20.0
"""How long a call may take before the backend counts as stuck."""
LAUNCH_S = 90.0


@dataclass(frozen=True)
class BackendTest:
    """A backend's self-test as rank 0 saw it; where there is none, `problem` says why.

    `untestable` means that nothing is known to be wrong: the backend was not tried.
    """

    backend: str
    result: SelfTest | None = None
    problem: str = ""
    untestable: bool = False

    @property
    def ok(self) -> bool:
        """Whether nothing was found wrong."""
        return self.untestable or (self.result is not None and self.result.ok)


def try_backend(backend: str, ranks: int) -> BackendTest:
    """Start ranks, let them run the self-test on this backend of torch.distributed, end them."""
    problem = _unavailable(backend, ranks)
    if problem:
        return BackendTest(backend, problem=problem)
    with tempfile.TemporaryDirectory(prefix="unisono-") as folder:
        try:
            results = launch(
                _run, ranks, (backend, folder), threads=1, timeout=LAUNCH_S, capture=True
            )
        except (RanksFailed, RanksTimedOut) as error:
            return BackendTest(backend, problem=str(error))
    first = results[0]
    if isinstance(first, str):
        return BackendTest(backend, problem=first, untestable=True)
    seen = [result for result in results if isinstance(result, SelfTest)]
    # rank 0's, unless another rank saw more than could be told through the group
    return BackendTest(backend, min(seen, key=lambda result: result.ok))


def _unavailable(backend: str, ranks: int) -> str:
    from unisono.torch_backend.autoload import backend_problem

    try:
        problem = backend_problem(backend)
    except TorchMissing as error:
        return str(error)
    if problem:
        return problem
    import torch

    if backend == "nccl" and torch.cuda.device_count() < ranks:
        return (
            f"nccl wants a GPU for each of {ranks} ranks, and there are {torch.cuda.device_count()}"
        )
    return ""


def _run(backend: str, folder: str) -> SelfTest | str:
    """Run by every rank. A text says why this backend cannot be tried."""
    import torch
    import torch.distributed as dist

    info = read_rank_info()
    assert info is not None
    rank, size = info.rank, info.size
    if backend == "nccl":
        torch.cuda.set_device(rank)
    store = dist.FileStore(os.path.join(folder, backend), size)  # type: ignore[attr-defined]
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=CALL_S)
    )
    try:
        try:
            comm = resolve()
        except UnisonoError as error:
            return str(error)
        return debug_communication(comm, show=False)
    finally:
        dist.destroy_process_group()
