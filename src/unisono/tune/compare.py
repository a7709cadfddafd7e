"""Candidates by turns on the same group, and when one of them counts as faster."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from unisono.bench.control import Control
from unisono.bench.measurer import QueueClock
from unisono.comm.shared_memory.communicator import SharedMemoryCommunicator
from unisono.tune.calls import Call

FASTER = 0.95
"""A candidate replaces a default only if it takes at most this share of its time, on average over
the sizes at which they differ, in each of two passes;"""
NO_SLOWER = 1.03
"""and at no size more than this."""

_SAMPLE_S = 200e-6
"""Calls go back to back for about this long, and then all ranks meet."""
_TURN_S = 0.004
_BLOCKS_AT_LEAST = 5
_BLOCKS_AT_MOST = 60


@dataclass(frozen=True)
class Candidate:
    """A tuning, by the numbers that are not the group's present ones, and a call to time."""

    name: str
    sizes: Mapping[str, int]
    call: Call


@dataclass(frozen=True)
class Times:
    """Microseconds of each candidate, block by block: in one block all had a turn, so that what
    disturbs the machine for longer disturbs all of them."""

    blocks_us: Mapping[str, NDArray[numpy.float64]]

    def us(self, name: str) -> float:
        """The median."""
        return float(numpy.median(self.blocks_us[name]))

    def ratio(self, name: str, against: str) -> float:
        """How many times as long `name` takes: the median over the blocks."""
        return float(numpy.median(self.blocks_us[name] / self.blocks_us[against]))

    def is_clear(self, name: str, against: str) -> bool:
        """Whether it took less time in three blocks of four."""
        ratios = self.blocks_us[name] / self.blocks_us[against]
        return float(numpy.quantile(ratios, 0.75)) < 1


def is_faster(ratios: Sequence[float], clear: Sequence[bool]) -> bool:
    """Whether a candidate with these ratios, size by size, is worth having."""
    if not ratios:
        return False
    return (
        mean_ratio(ratios) <= FASTER and max(ratios) <= NO_SLOWER and 2 * sum(clear) >= len(clear)
    )


def mean_ratio(ratios: Sequence[float]) -> float:
    """The geometric mean."""
    return float(numpy.exp(numpy.mean(numpy.log(ratios))))


class Comparer:
    """Times candidates on one group, all ranks together; every rank gets the same figures."""

    def __init__(self, comm: SharedMemoryCommunicator, control: Control) -> None:
        self.comm, self.control = comm, control
        self.took_s = self.queued_s = 0.0
        """How long was measured, and for how long a rank that wanted to run had no core."""
        self._clock = QueueClock()
        self._before = comm.tuning

    def compare(self, candidates: Sequence[Candidate], budget_s: float) -> Times:
        """Time the candidates for about `budget_s` seconds, and leave the group as it was."""
        self._before = self.comm.tuning
        order = list(range(len(candidates)))
        shuffler = random.Random(len(candidates))  # the same order on every rank
        begin_s, queued_s = time.perf_counter(), self._clock.queued_s()
        gc.disable()
        try:
            plans = [self._plan(candidate) for candidate in candidates]
            blocks = []
            for number in range(_BLOCKS_AT_MOST):
                shuffler.shuffle(order)
                block = numpy.zeros(len(candidates))
                for which in order:
                    block[which] = self._turn(candidates[which], *plans[which])
                blocks.append(block)
                late = time.perf_counter() - begin_s > budget_s
                if number + 1 >= _BLOCKS_AT_LEAST and self.control.agree(float(late)):
                    break
        finally:
            gc.enable()
            self.comm.tune(self._before)
        self.took_s += time.perf_counter() - begin_s
        self.queued_s += self._clock.queued_s() - queued_s
        columns = numpy.array(blocks).T
        return Times({candidate.name: columns[i] for i, candidate in enumerate(candidates)})

    def time_once_s(self, call: Call) -> float:
        """Of the slowest rank, warmed up: a first look, at little cost."""
        call()
        mine = min(self._sample(call, 1) for _ in range(2))
        return float(self.control.gather(numpy.array([mine])).max())

    def is_over(self, end_s: float) -> bool:
        """Whether rank 0's clock (`time.perf_counter`) is past `end_s`, on every rank."""
        return bool(self.control.agree(float(time.perf_counter() > end_s)))

    def _plan(self, candidate: Candidate) -> tuple[int, int]:
        """How many calls make a sample, and how many samples a turn."""
        self.comm.tune(self._before | dict(candidate.sizes))
        candidate.call()
        tries = [self._sample(candidate.call, 1) for _ in range(3)]
        estimate_s = max(1e-7, float(self.control.gather(numpy.array([min(tries)])).max()))
        batch = max(1, min(200, round(_SAMPLE_S / estimate_s)))
        return batch, max(1, min(20, round(_TURN_S / (estimate_s * batch))))

    def _turn(self, candidate: Candidate, batch: int, repeat: int) -> float:
        """The median of a turn's samples, each that of the slowest rank, in microseconds a call."""
        self.comm.tune(self._before | dict(candidate.sizes))
        candidate.call()
        mine = numpy.array([self._sample(candidate.call, batch) for _ in range(repeat)])
        return float(numpy.median(self.control.gather(mine).max(axis=0))) / batch * 1e6

    def _sample(self, call: Call, batch: int) -> float:
        self.control.comm.barrier()
        begin_s = time.perf_counter()
        for _ in range(batch):
            call()
        return time.perf_counter() - begin_s
