"""How one row is measured: checked, warmed up, and timed in blocks in which the backends take
turns."""

import gc
import os
import random
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from itertools import cycle, islice
from typing import Self, TypeAlias

import numpy
from numpy.typing import NDArray

from unisono.bench import floor
from unisono.bench.backends.base import Backend, Buffers, Call, Case, Unsupported
from unisono.bench.collectives import bandwidths, item_bytes, messages
from unisono.bench.exact import POISON, CheckedCall
from unisono.bench.results import Row, Skipped, summarise
from unisono.comm.communicator import Communicator
from unisono.errors import UnisonoError

BATCH_BYTES = 64 << 10
"""Up to this size calls run back to back after one barrier; above it, each has its own barrier."""
SHORT_S = 100e-6
"""A longer call is timed alone: the mean of several would hide their spread."""
BATCH_S = 0.003
TURN_S = 0.02
"""About how long a batch of calls runs, and how long single calls run, before the next backend's
turn."""
BATCH_CALLS = 20_000
TURN_CALLS = 50
BLOCKS_AT_LEAST = 5
BLOCKS_AT_MOST = 400
STABLE = 0.01
"""A row is done when every median is known to this relative precision, or its time is up."""
MEETING_S = 20e-6
"""How long a rank sleeps at a time until all have finished a turn."""
QUEUED_SHARE = 0.1
"""A sample is disturbed if a rank was ready to run but had no core for this share of it."""


_Turns: TypeAlias = "dict[str, list[NDArray[numpy.float64]]]"


@dataclass
class _Contestant:
    """One backend in a row, or the floor, and its samples on this rank."""

    name: str
    calls: Sequence[Call]
    device: str
    is_floor: bool = False
    wrong: int = 0
    batch: int = 1
    """Calls in one sample."""
    repeat: int = 1
    """Samples in one turn."""

    def synchronise(self) -> None:
        if self.device != "cpu":
            import torch

            torch.cuda.synchronize(self.device)


@dataclass(frozen=True)
class _Samples:
    """Samples of all ranks; the shape of each part is (ranks, samples)."""

    begin_s: NDArray[numpy.float64]
    end_s: NDArray[numpy.float64]
    queued_s: NDArray[numpy.float64]

    @classmethod
    def of(cls, turns: Sequence[NDArray[numpy.float64]]) -> Self:
        return cls(*numpy.moveaxis(numpy.concatenate(turns, axis=1), 2, 0))

    def took_s(self) -> NDArray[numpy.float64]:
        """Each sample's time: that of the slowest rank."""
        slowest: NDArray[numpy.float64] = numpy.max(self.end_s - self.begin_s, axis=0)
        return slowest


class Control:
    """The ranks' control channel: a Communicator other than the measured one."""

    def __init__(self, comm: Communicator, same_clock: bool = True) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.same_clock = same_clock

    def meet(self) -> None:
        """Return once all ranks are here, without taking a core from ranks that still work."""
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


@dataclass
class Measurer:
    """Measures rows, on all ranks together; every rank gets the same numbers."""

    control: Control
    backends: Sequence[Backend]
    _: KW_ONLY
    budget_s: float
    with_floor: bool = True
    crowded: bool = False
    """Whether there are more ranks than cores."""

    def __post_init__(self) -> None:
        self._clock = _QueueClock()
        self._buffers: dict[str, Buffers] = {}

    def measure(self, case: Case) -> tuple[list[Row], list[Skipped]]:
        """One row per backend that supports this, and the backends that do not."""
        contestants, skipped = self.prepare(case)
        if contestants and self.with_floor:
            device, buffers = next(iter(self._buffers.items()))
            calls = floor.floor_calls(case, buffers)
            if calls is not None:
                contestants.append(_Contestant(floor.NAME, calls, device, is_floor=True))
        if not contestants:
            return [], skipped
        self._plan(case, contestants)
        samples = self._time(case, contestants)
        floor_us = None
        for contestant in contestants:
            if contestant.is_floor:
                took_s = samples[contestant.name].took_s() / contestant.batch
                floor_us = float(numpy.median(took_s)) * 1e6
            else:
                contestant.wrong += self._check(case, contestant, phase=1)
        self._buffers = {}
        rows = [
            self._row(case, contestant, samples[contestant.name], floor_us)
            for contestant in contestants
            if not contestant.is_floor
        ]
        return rows, skipped

    # -- before the clock runs -----------------------------------------------------------------

    def prepare(self, case: Case) -> tuple[list[_Contestant], list[Skipped]]:
        """Who takes part, each checked once, and who does not."""
        self._buffers = {}
        contestants: list[_Contestant] = []
        skipped: list[Skipped] = []
        for backend in self.backends:
            device = backend.device
            if device not in self._buffers:
                self._buffers[device] = Buffers.make(case, device)
            try:
                calls = backend.calls(case, self._buffers[device])
                contestant = _Contestant(backend.name, calls, device)
                contestant.wrong = self._check(case, contestant, phase=0)
            except UnisonoError:
                raise
            except (Unsupported, ValueError, TypeError, RuntimeError) as error:
                # A backend rejects arguments on every rank, before it moves data.
                reason = str(error).strip().split("\n")[0]
                skipped.append(Skipped(f"{backend.name} {case.collective.name}", reason))
            else:
                contestants.append(contestant)
        return contestants, skipped

    def _check(self, case: Case, contestant: _Contestant, phase: int) -> int:
        """How many elements are wrong on all ranks after one call. The buffers are zero because
        sums of zeros stay zero, however often they are reduced in place."""
        which = 0 if phase else -1
        root = case.roots[which] if case.collective.is_rooted else 0
        buffers = self._buffers[contestant.device]
        rank, size = self.control.rank, self.control.size
        call = CheckedCall(case.collective, case.op, rank, size, root, phase)
        buffers.output.fill_(POISON)
        call.fill(buffers.input)
        self.control.meet()
        contestant.calls[which]()
        contestant.synchronise()
        self.control.meet()
        wrong = call.wrong(buffers.output)
        buffers.output.zero_()
        buffers.input.zero_()
        return int(self.control.gather(numpy.array([float(wrong)])).sum())

    def _plan(self, case: Case, contestants: Sequence[_Contestant]) -> None:
        """Warm up, and decide how many calls make a sample and how many samples a turn."""
        for contestant in contestants:
            estimate_s = self._estimate_s(contestant, 1)
            if case.size_bytes <= BATCH_BYTES:
                for calls_at_most in (500, BATCH_CALLS):  # the second time from calls back to back
                    fit = min(calls_at_most, round(BATCH_S / estimate_s))
                    contestant.batch = fit if estimate_s < SHORT_S else 1
                    estimate_s = self._estimate_s(contestant, contestant.batch)
            if contestant.batch == 1:
                contestant.repeat = max(1, min(TURN_CALLS, round(TURN_S / estimate_s)))

    def _estimate_s(self, contestant: _Contestant, batch: int) -> float:
        """The least of three tries, of the slowest rank; the same on every rank."""
        tries = []
        for _ in range(3):
            begin_s, end_s, _ = self._sample(contestant, batch)
            tries.append((end_s - begin_s) / batch)
        return max(1e-7, float(self.control.gather(numpy.array([min(tries)])).max()))

    # -- while it runs -------------------------------------------------------------------------

    def _time(self, case: Case, contestants: Sequence[_Contestant]) -> dict[str, _Samples]:
        taken: _Turns = {contestant.name: [] for contestant in contestants}
        order = list(contestants)
        shuffler = random.Random(case.size_bytes)  # the same order on every rank
        end_s = time.perf_counter() + self.budget_s
        gc.collect()
        gc.disable()
        try:
            for block in range(BLOCKS_AT_MOST):
                shuffler.shuffle(order)
                for contestant in order:
                    taken[contestant.name].append(self._turn(contestant))
                enough = block + 1 >= BLOCKS_AT_LEAST and time.perf_counter() > end_s
                if block % 5 == 4 and not enough:
                    known = [summarise(_Samples.of(turns).took_s()) for turns in taken.values()]
                    enough = all(each.uncertainty < STABLE for each in known)
                late = time.perf_counter() > end_s + 4 * self.budget_s and block >= 2
                if self.control.agree(float(enough or late)):
                    break
        finally:
            gc.enable()
        return {name: _Samples.of(turns) for name, turns in taken.items()}

    def _turn(self, contestant: _Contestant) -> NDArray[numpy.float64]:
        """One contestant's samples of a block, from all ranks: (ranks, samples, 3)."""
        contestant.calls[0]()  # brings the backend's memory back into the caches
        contestant.synchronise()
        repeat, batch = range(contestant.repeat), contestant.batch
        mine = numpy.array([self._sample(contestant, batch) for _ in repeat])
        self.control.meet()
        return self.control.gather(mine.reshape(-1)).reshape(self.control.size, -1, 3)

    def _sample(self, contestant: _Contestant, batch: int) -> tuple[float, float, float]:
        """(begin, end, how long this rank had no core) of `batch` calls after a barrier."""
        todo = list(islice(cycle(contestant.calls), batch))
        queued_before_s = self._clock.queued_s()
        self.control.comm.barrier()  # all start at nearly the same moment
        begin_s = time.perf_counter()
        for call in todo:
            call()
        contestant.synchronise()
        end_s = time.perf_counter()
        return begin_s, end_s, self._clock.queued_s() - queued_before_s

    # -- afterwards ----------------------------------------------------------------------------

    def _row(
        self, case: Case, contestant: _Contestant, samples: _Samples, floor_us: float | None
    ) -> Row:
        collective, ranks = case.collective, case.ranks
        if not collective.is_collective and ranks % 2:  # the last one has no neighbour
            samples = _Samples(samples.begin_s[:-1], samples.end_s[:-1], samples.queued_s[:-1])
        each = contestant.batch * messages(collective.name, case.size_bytes)
        time_us = summarise(samples.took_s() / each * 1e6)
        items = item_bytes(case.dtype)
        counts = collective.counts(case.size_bytes, items, ranks)
        algbw, busbw = bandwidths(collective, counts.size * items, time_us.p50 / 1e6, ranks)
        skew_us = transfer_us = None
        if self.control.same_clock:
            last_s = samples.begin_s.max(axis=0)
            skew_us = float(numpy.median(last_s - samples.begin_s.min(axis=0)) * 1e6)
            transfer_us = float(numpy.median(samples.end_s.max(axis=0) - last_s) / each * 1e6)
        return Row(
            collective=collective.name,
            size_bytes=counts.size * items,
            count=counts.size,
            dtype=case.dtype,
            op=case.op if collective.reduces else "none",
            root=(case.roots[0] if len(case.roots) == 1 else -1) if collective.is_rooted else -1,
            backend=contestant.name,
            ranks=ranks,
            time_us=time_us,
            skew_us=skew_us,
            transfer_us=transfer_us,
            algbw=algbw,
            busbw=busbw,
            wrong=contestant.wrong,
            floor_us=floor_us,
            expected_us=None,
            calibrates=False,
            samples=samples.begin_s.shape[1],
            calls_per_sample=contestant.batch,
            disturbed_share=self._disturbed_share(contestant, samples),
        )

    def _disturbed_share(self, contestant: _Contestant, samples: _Samples) -> float:
        """The share of samples in which a rank was ready to run but had no core."""
        # gloo's own threads compete with one another, and ranks that share a core do anyway.
        if self.crowded or contestant.name == "gloo":
            return 0.0
        queued = samples.queued_s.max(axis=0) / samples.took_s()
        return float(numpy.mean(queued > QUEUED_SHARE))


class _QueueClock:
    """How long this thread was ready to run but had no core."""

    def __init__(self) -> None:
        self._file = -1
        with suppress(OSError):  # a kernel that does not count it
            # Kept open: opening it for each sample would evict the measured data from the caches.
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._file)

    def queued_s(self) -> float:
        """Since the thread started; 0 if the kernel does not count it."""
        if self._file < 0:
            return 0.0
        return int(os.pread(self._file, 64, 0).split()[1]) / 1e9
