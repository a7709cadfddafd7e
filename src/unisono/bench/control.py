"""How the ranks of a benchmark keep together beside what they measure: start, meet, gather."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

import numpy
from numpy.typing import NDArray

from unisono.comm.base import Communicator

MEETING_S = 20e-6
"""How long a rank sleeps at a time until all are through with a turn."""


class Control(ABC):
    """The ranks' own channel. It is never the group that is measured."""

    rank: int
    size: int
    same_clock: bool
    """Whether the ranks' clocks are one: they are on one machine."""

    @abstractmethod
    def barrier(self) -> None:
        """Let all ranks go at the same moment, or nearly so."""

    @abstractmethod
    def meet(self) -> None:
        """Return once all ranks are here, without taking a core from those who still work."""

    @abstractmethod
    def gather(self, values: NDArray[numpy.float64]) -> NDArray[numpy.float64]:
        """Every rank's values, one row per rank, on every rank."""

    def agree(self, value: float) -> float:
        """Rank 0's value, on every rank."""
        return float(self.gather(numpy.array([value]))[0, 0])

    def close(self) -> None:  # noqa: B027 - not every channel is ours to close
        """Leave the others."""


class OneMachine(Control):
    """Over shared memory."""

    same_clock = True

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size

    def barrier(self) -> None:
        self.comm.barrier()

    def meet(self) -> None:
        meeting = self.comm.barrier(async_op=True)
        assert meeting is not None
        while not meeting.is_completed():
            time.sleep(MEETING_S)
        meeting.wait()

    def gather(self, values: NDArray[numpy.float64]) -> NDArray[numpy.float64]:
        gathered = numpy.empty((self.size, values.size))
        self.comm.all_gather(gathered, values)
        return gathered

    def close(self) -> None:
        self.comm.close()


class OverTorch(Control):
    """Over a process group of torch: for ranks on several machines."""

    def __init__(self, group: Any, same_clock: bool) -> None:
        import torch.distributed as dist

        self.group, self.same_clock = group, same_clock
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def barrier(self) -> None:
        import torch.distributed as dist

        dist.barrier(self.group)

    def meet(self) -> None:
        self.barrier()

    def gather(self, values: NDArray[numpy.float64]) -> NDArray[numpy.float64]:
        import torch
        import torch.distributed as dist

        gathered = [torch.empty(values.size, dtype=torch.float64) for _ in range(self.size)]
        dist.all_gather(gathered, torch.from_numpy(values.reshape(-1)), group=self.group)
        return numpy.stack([values.numpy() for values in gathered])
