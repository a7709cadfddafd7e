"""The tour behind `unisono demo`: the collectives at work, then a race against gloo."""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from unisono import world
from unisono.comm.base import Communicator
from unisono.launcher import launch

CALLS_A_TURN = 20
RACE_BYTES = (8, 1024, 64 * 1024, 1 << 20, 16 << 20)


@dataclass(frozen=True)
class Picture:
    """One collective: what this rank had and what it has now."""

    title: str
    before: str
    after: str


@dataclass(frozen=True)
class Lap:
    """Median time of one call of each contestant."""

    collective: str
    size_bytes: int
    unisono_us: float
    gloo_us: float


def show_collectives() -> list[Picture]:
    """Run by every rank: each collective once, on numbers that a reader can add up."""
    import torch

    comm = world.init()
    rank, size = comm.rank, comm.size
    pictures = []

    def show(title: str, before: Any, after: Any) -> None:
        pictures.append(Picture(title, _numbers(before), _numbers(after)))

    mine = torch.arange(size, dtype=torch.float32) + rank
    total = mine.clone()
    comm.all_reduce(total)
    show("all_reduce (sum)", mine, total)

    part = torch.empty(1)
    comm.reduce_scatter(part, mine)
    show("reduce_scatter (sum)", mine, part)

    again = torch.empty(size)
    comm.all_gather(again, part)
    show("all_gather of that: the all_reduce again", part, again)
    if not torch.equal(again, total):
        raise AssertionError("all_reduce differs from reduce_scatter followed by all_gather")

    weights = torch.full((2,), float(rank + 1))
    sent = weights.clone()
    comm.broadcast(sent, root=0)
    show("broadcast from rank 0", weights, sent)

    row = torch.tensor([10.0 * rank + column for column in range(size)])
    column = torch.empty(size)
    comm.all_to_all(column, row)
    show("all_to_all", row, column)

    loss = torch.tensor([float(rank)])
    mean = loss.clone()
    comm.all_reduce(mean, "mean")
    show("all_reduce (mean)", loss, mean)
    return pictures


def race(folder: str, budget_s: float) -> list[Lap]:
    """Run by every rank: the same call on unisono and on gloo, in turns."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    comm = world.init("unisono", with_torch=False)  # gloo has torch's group here
    store = dist.FileStore(os.path.join(folder, "gloo"), comm.size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
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


def run_demo(ranks: int, report: Path, console: Console, budget_s: float = 10.0) -> None:
    """Show the collectives on `ranks` ranks, race gloo on two, and write the report."""
    start = time.perf_counter()
    console.print(f"[bold]unisono[/]: {ranks} processes of this machine over shared memory\n")
    pictures = launch(show_collectives, ranks)
    for number, picture in enumerate(pictures[0]):
        console.print(f"[bold cyan]{picture.title}[/]")
        console.print(_picture_table([mine[number] for mine in pictures]))

    console.print(f"\nall_reduce of float32 on 2 ranks, in turns with gloo ({budget_s:g} s) ...")
    with tempfile.TemporaryDirectory(prefix="unisono-") as folder:
        laps = launch(race, 2, (folder, budget_s))[0]
    console.print(_race_table(laps))

    report.write_text(_report(pictures, laps, ranks))
    console.print(f"report: {report} ({time.perf_counter() - start:.0f} s in all)")


def _picture_table(pictures: Sequence[Picture]) -> Table:
    table = Table()
    table.add_column("rank", justify="right")
    table.add_column("had")
    table.add_column("has")
    for rank, picture in enumerate(pictures):
        table.add_row(str(rank), picture.before, picture.after)
    return table


def _race_table(laps: Sequence[Lap]) -> Table:
    table = Table()
    for heading in ("all_reduce of", "unisono us", "gloo us", "times faster"):
        table.add_column(heading, justify="right")
    for lap in laps:
        table.add_row(*_race_row(lap))
    return table


def _race_row(lap: Lap) -> tuple[str, str, str, str]:
    ratio = lap.gloo_us / lap.unisono_us
    return _bytes(lap.size_bytes), f"{lap.unisono_us:.1f}", f"{lap.gloo_us:.1f}", f"{ratio:.1f}"


def _report(pictures: Sequence[Sequence[Picture]], laps: Sequence[Lap], ranks: int) -> str:
    import torch

    lines = [
        "# unisono on this machine",
        "",
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}. Written by `unisono demo`.",
        "",
        f"## The collectives on {ranks} ranks",
    ]
    for number, picture in enumerate(pictures[0]):
        lines += ["", f"### {picture.title}", "", "| rank | had | has |", "|---|---|---|"]
        lines += [
            f"| {rank} | {mine[number].before} | {mine[number].after} |"
            for rank, mine in enumerate(pictures)
        ]
    lines += ["", "## all_reduce of float32 on 2 ranks, median of one call", ""]
    lines += ["| bytes | unisono us | gloo us | times faster |", "|---|---|---|---|"]
    lines += ["| " + " | ".join(_race_row(lap)) + " |" for lap in laps]
    return "\n".join(lines) + "\n"


def _numbers(tensor: Any) -> str:
    return " ".join(f"{value:g}" for value in tensor.tolist())


def _bytes(count: int) -> str:
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count // size} {unit}"
    return f"{count} B"
