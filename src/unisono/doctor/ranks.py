"""The self-test on new processes of this machine, on any backend of torch.distributed."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from datetime import timedelta
from typing import cast

from unisono import variables
from unisono.comm.shared_memory.memory_transport import SharedMemory
from unisono.doctor.self_test import Check, SelfTest, self_test
from unisono.errors import RanksFailed, RanksTimedOut, TorchMissing
from unisono.launcher.functions import launch
from unisono.world.environment import read_rank_info
from unisono.world.world import resolve

CALL_S = 20.0
"""How long a call may take before the backend counts as stuck."""
LAUNCH_S = 90.0


def try_backend(backend: str, ranks: int) -> SelfTest:
    """Start ranks that run the self-test. If they fail, there is one check, "start", that says
    why."""
    problem = _unavailable(backend, ranks)
    if not problem:
        with tempfile.TemporaryDirectory(prefix="unisono-") as folder:
            try:
                results = launch(
                    _run, ranks, (backend, folder), threads=1, timeout=LAUNCH_S, capture=True
                )
            except (RanksFailed, RanksTimedOut) as error:
                problem = str(error)
            else:
                # rank 0's, unless another rank saw more than it could send through the group
                return min(results, key=lambda result: result.ok)
    return SelfTest("world", backend, 0, ranks, (Check("start", False, message=problem),))


def _unavailable(backend: str, ranks: int) -> str:
    from unisono.torch_backend.autoload import backend_problem

    try:
        problem = backend_problem(backend)
    except TorchMissing as error:
        return str(error)
    if problem or backend != "nccl":
        return problem
    import torch

    gpus = torch.cuda.device_count()
    return "" if gpus >= ranks else f"nccl needs a GPU for each of {ranks} ranks; there are {gpus}"


def _run(backend: str, folder: str) -> SelfTest:
    import torch
    import torch.distributed as dist

    info = read_rank_info()
    assert info is not None
    if backend == "nccl":
        torch.cuda.set_device(info.rank)
    store = dist.FileStore(os.path.join(folder, backend), info.size)  # type: ignore[attr-defined]
    limit = timedelta(seconds=CALL_S)
    dist.init_process_group(
        backend, store=store, rank=info.rank, world_size=info.size, timeout=limit
    )
    try:
        result = self_test(show=False)
        if backend == "unisono" and info.size > 1 and result.ok:
            result = replace(result, checks=(*result.checks, _exchange_large_tensors()))
        return result
    finally:
        dist.destroy_process_group()


def _exchange_large_tensors() -> Check:
    """Whether the kernel copies large tensors from rank to rank."""
    import torch

    comm = resolve(None)
    given = torch.full((comm.size << 16,), float(comm.rank))
    out = torch.empty_like(given)
    comm.all_to_all(out, given)
    wanted = torch.arange(comm.size).repeat_interleave(1 << 16)
    is_right = torch.equal(out, wanted.float())
    if cast(SharedMemory, comm.transport).group.state()["reads"]:
        return Check("large tensors", is_right, message="copied once, by the kernel")
    is_off = variables.READ_PEERS.read_or_warn() is False
    cause = f"{variables.READ_PEERS.name}=0" if is_off else "the kernel does not allow it"
    return Check("large tensors", is_right, message=f"copied twice: {cause}")
