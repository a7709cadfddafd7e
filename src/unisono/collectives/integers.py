"""A few integers from every rank: how ranks tell each other what they are about to do."""

from __future__ import annotations

from typing import Any

import numpy
import torch

from unisono.comm.base import Communicator
from unisono.comm.shared_memory.communicator import SharedMemoryCommunicator


def device_of(comm: Communicator) -> Any:
    """Where a Communicator takes tensors that nobody has given a device."""
    return getattr(comm, "device", "cpu")


def all_gather_integers(
    comm: Communicator, integers: tuple[int, ...], device: Any
) -> list[tuple[int, ...]]:
    """Every rank's integers, in rank order; all ranks pass equally many. Where a Communicator has
    no way of its own for that, they travel in memory of this device."""
    if isinstance(comm, SharedMemoryCommunicator):
        return comm.exchange_integers(integers)
    everyone: Any
    if str(device) == "cpu":  # arrays are made in a fraction of the time that tensors take
        everyone = numpy.empty((comm.size, len(integers)), dtype=numpy.int64)
        comm.all_gather(everyone, numpy.array(integers, dtype=numpy.int64))
    else:
        everyone = torch.empty((comm.size, len(integers)), dtype=torch.int64, device=device)
        comm.all_gather(everyone, torch.tensor(integers, dtype=torch.int64, device=device))
    return [tuple(theirs) for theirs in everyone.tolist()]
