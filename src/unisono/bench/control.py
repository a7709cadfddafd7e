"""How the ranks of a benchmark keep together beside what they measure: start, meet, gather."""

from __future__ import annotations

import time

import numpy
from numpy.typing import NDArray

from unisono.comm.base import Communicator

MEETING_S = 20e-6
"""How long a rank sleeps at a time until all are through with a turn."""


class Control:
    """The ranks' own channel: a Communicator that is not the one which is measured.

    `same_clock` says whether the ranks' clocks are one: they are on one machine.
    """

    def __init__(self, comm: Communicator, same_clock: bool = True) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.same_clock = same_clock

    def meet(self) -> None:
        """Return once all ranks are here, without taking a core from those who still work."""
        meeting = self.comm.barrier(async_op=True)
        assert meeting is not None
        while not meeting.is_completed():
            time.sleep(MEETING_S)
        meeting.wait()

    def gather(self, values: NDArray[numpy.float64]) -> NDArray[numpy.float64]:
        """Every rank's values, one row per rank, on every rank."""
        gathered = numpy.empty((self.size, values.size))
        self.comm.all_gather(gathered, values)
        return gathered

    def agree(self, value: float) -> float:
        """Rank 0's value, on every rank."""
        return float(self.gather(numpy.array([value]))[0, 0])
