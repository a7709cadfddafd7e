"""Which device a rank measures on: the CPU, or a GPU of its host, which ranks may share."""

from __future__ import annotations

from typing import Any

import numpy

from unisono.bench.control import Control
from unisono.bench.meeting import Meeting
from unisono.bench.settings import BenchSettings
from unisono.errors import UnisonoError
from unisono.plan.sizes import format_size

MEMORY_SHARE = 0.9
"""The share of a GPU's free memory that a run may use."""


def neighbours(meeting: Meeting) -> list[int]:
    """The ranks of this rank's host."""
    hosts = meeting.hosts()
    return [rank for rank, host in enumerate(hosts) if host == hosts[meeting.rank]]


def take_device(meeting: Meeting) -> str:
    """This rank's GPU, by turns where the host has more ranks than GPUs; current from now on."""
    import torch

    device = f"cuda:{neighbours(meeting).index(meeting.rank) % torch.cuda.device_count()}"
    torch.cuda.set_device(device)
    return device


def synchronise(device: str) -> None:
    """Return once the device has done all that was asked of it."""
    if device != "cpu":
        import torch

        torch.cuda.synchronize(device)


def describe_gpu(device: str) -> dict[str, Any]:
    """What of the GPU matters to a reader of the figures; nothing for a CPU."""
    if device == "cpu":
        return {}
    import torch

    return {"gpu": torch.cuda.get_device_name(device), "gpus": torch.cuda.device_count()}


def check_gpu_memory(control: Control, settings: BenchSettings, device: str) -> None:
    """Raise UnisonoError on all ranks where the largest row does not fit into a GPU's memory."""
    import torch

    free_bytes, _ = torch.cuda.mem_get_info(device)
    everyone = control.gather(numpy.array([float(free_bytes)]))[:, 0]
    need, what = settings.memory_bytes()
    sharing = -(-settings.ranks // torch.cuda.device_count())
    room = MEMORY_SHARE * float(everyone.min())
    if need / settings.ranks * sharing > room:
        raise UnisonoError(
            f"{what} on {sharing} ranks of a GPU needs about "
            f"{format_size(need / settings.ranks * sharing)}B of its memory, and "
            f"{format_size(room)}B may be used: choose smaller sizes"
        )
