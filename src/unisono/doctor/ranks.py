"""The self-test on real ranks: new processes of this machine, one backend after the other."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from unisono.doctor.selftest.results import SelfTest
from unisono.doctor.selftest.run import debug_communication
from unisono.errors import RanksFailed, RanksTimedOut, TorchMissing, UnisonoError
from unisono.launcher import launch
from unisono.world.world import resolve

CALL_S = 20.0
"""How long a call may take before the backend counts as stuck."""
LAUNCH_S = 90.0


@dataclass(frozen=True)
class Tested:
    """A backend's self-test as rank 0 saw it; where there is none, `problem` says why.

    `untestable` means that nothing is known to be wrong: the backend was not tried.
    """

    backend: str
    report: SelfTest | None = None
    problem: str = ""
    untestable: bool = False

    @property
    def ok(self) -> bool:
        """Whether nothing was found wrong."""
        return self.untestable or (self.report is not None and self.report.ok)


def try_backend(backend: str, ranks: int) -> Tested:
    """Start ranks, let them run the self-test on this backend of torch.distributed, end them."""
    problem = _not_to_be_had(backend, ranks)
    if problem:
        return Tested(backend, problem=problem)
    with tempfile.TemporaryDirectory(prefix="unisono-") as folder:
        try:
            reports = launch(
                _run, ranks, (backend, folder), threads=1, timeout=LAUNCH_S, capture=True
            )
        except (RanksFailed, RanksTimedOut) as error:
            return Tested(backend, problem=str(error))
    first = reports[0]
    if isinstance(first, str):
        return Tested(backend, problem=first, untestable=True)
    return Tested(backend, _with_all_verdicts(reports))


def _not_to_be_had(backend: str, ranks: int) -> str:
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

    rank, size = int(os.environ["UNISONO_RANK"]), int(os.environ["UNISONO_SIZE"])
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


def _with_all_verdicts(reports: Sequence[SelfTest | str]) -> SelfTest:
    """Rank 0's report, unless another rank saw more than could be told through the group."""
    seen = [one for one in reports if isinstance(one, SelfTest)]
    return min(seen, key=lambda one: one.ok)
