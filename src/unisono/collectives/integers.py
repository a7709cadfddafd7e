"""A few integers from every rank: how ranks tell each other what they are about to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch

from unisono.comm.base import Communicator


def device_of(comm: Communicator) -> Any:
    """Where a Communicator takes tensors that nobody has given a device."""
    return getattr(comm, "device", "cpu")


def all_gather_integers(
    comm: Communicator, integers: Sequence[int], device: Any
) -> list[list[int]]:
    """Every rank's integers, in rank order; all ranks pass equally many. They travel in memory of
    this device."""
    if str(device) == "cpu":  # arrays are made in a fraction of the time that tensors take
        everyone = numpy.empty((comm.size, len(integers)), dtype=numpy.int64)
        comm.all_gather(everyone, numpy.array(integers, dtype=numpy.int64))
        return everyone.tolist()
    tensor = torch.empty((comm.size, len(integers)), dtype=torch.int64, device=device)
    comm.all_gather(tensor, torch.tensor(integers, dtype=torch.int64, device=device))
    return tensor.tolist()
