"""The race: the same call on unisono and on gloo, in turns, by the same ranks."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from unisono.comm.base import Communicator
from unisono.launcher import launch
from unisono.world.world import resolve

CALLS_A_TURN = 20
RACE_BYTES = (8, 1024, 64 * 1024, 1 << 20, 16 << 20)


@dataclass(frozen=True)
class Lap:
    """Median time of one call of each contestant."""

    collective: str
    size_bytes: int
    unisono_us: float
    gloo_us: float


def race(budget_s: float) -> list[Lap]:
    """Start two ranks and let them run for `budget_s` seconds in all."""
    with tempfile.TemporaryDirectory(prefix="unisono-") as folder:
        return launch(_run, 2, (folder, budget_s), threads=1)[0]


def _run(folder: str, budget_s: float) -> list[Lap]:
    """Run by every rank: the same call on unisono and on gloo, in turns."""
    import torch
    import torch.distributed as dist

    rank, size = int(os.environ["UNISONO_RANK"]), int(os.environ["UNISONO_SIZE"])
    store = dist.FileStore(os.path.join(folder, "gloo"), size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    comm = resolve(dist.new_group(backend="unisono"))
    laps = []
    for size_bytes in RACE_BYTES:
        tensor = torch.zeros(size_bytes // 4)
        ours, theirs = _race_one(
            comm,
            lambda tensor=tensor: comm.all_reduce(tensor),  # type: ignore[misc]
            lambda tensor=tensor: dist.all_reduce(tensor),  # type: ignore[misc]
            budget_s / len(RACE_BYTES),
        )
        laps.append(Lap("all_reduce", size_bytes, ours, theirs))
    dist.destroy_process_group()
    return laps


def _race_one(
    comm: Communicator, ours: Callable[[], Any], theirs: Callable[[], Any], budget_s: float
) -> tuple[float, float]:
    import torch

    times_us: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + budget_s
    go_on = torch.ones(1, dtype=torch.int32)
    while go_on.item():
        for run, sink in zip((ours, theirs), times_us, strict=True):
            run()
            comm.barrier()
            start = time.perf_counter()
            for _ in range(CALLS_A_TURN):
                run()
            sink.append((time.perf_counter() - start) / CALLS_A_TURN * 1e6)
        go_on.fill_(time.perf_counter() < end or len(times_us[0]) < 3)
        comm.broadcast(go_on)
    return statistics.median(times_us[0]), statistics.median(times_us[1])


def table(laps: Sequence[Lap]) -> Table:
    drawn = Table()
    for heading in ("all_reduce of", "unisono us", "gloo us", "times faster"):
        drawn.add_column(heading, justify="right")
    for lap in laps:
        drawn.add_row(*row(lap))
    return drawn


def row(lap: Lap) -> tuple[str, str, str, str]:
    ratio = lap.gloo_us / lap.unisono_us
    return _bytes(lap.size_bytes), f"{lap.unisono_us:.1f}", f"{lap.gloo_us:.1f}", f"{ratio:.1f}"


def _bytes(count: int) -> str:
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count // size} {unit}"
    return f"{count} B"
