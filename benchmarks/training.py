"""Gradients averaged over ranks: GradientSync against DDP, many small ones in buckets and alone.

    python benchmarks/training.py                    2 ranks, some minutes
    python benchmarks/training.py --ranks 4 --only step
    python benchmarks/training.py --goals --json training.json

step: a step whose time is mostly communication (25 million parameters, a tiny batch), by
GradientSync on unisono, by DDP on unisono and by DDP on gloo. many: 1,000 gradients of 10 KB, by
GradientSync in buckets, none of it hidden, and by one all_reduce each, on unisono and on gloo. All
variants run in the same processes and take turns, in an order that is shuffled each time. A turn
takes as long as its slowest rank. Figures are medians.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from two_backends import TwoBackends

import unisono

PARTS = ("step", "many")
WIDTH, LAYERS = 1250, 16


@dataclass(frozen=True)
class Row:
    """One thing done in several variants, and each variant's median time."""

    part: str
    median_ms: dict[str, float]


class Rank(TwoBackends):
    """One rank, and what is measured on it."""

    def __init__(self, folder: str, turns: int) -> None:
        super().__init__(folder)
        self.turns = turns

    def measure(self, part: str, ways: dict[str, Callable[[], Any]]) -> Row:
        """Each variant's median, in turns; every rank returns the same figures."""
        for call in ways.values():
            for _ in range(3):  # buckets are created again after the first step
                call()
        times_ms: dict[str, list[float]] = {name: [] for name in ways}
        order, shuffler = list(ways), random.Random(1)
        gc.disable()
        for _ in range(self.turns):
            shuffler.shuffle(order)
            for name in order:
                self.comm.barrier()
                begin_s = time.perf_counter()
                ways[name]()
                times_ms[name].append(self.slowest(time.perf_counter() - begin_s) * 1e3)
        gc.enable()
        return Row(part, {name: statistics.median(times) for name, times in times_ms.items()})

    def step(self) -> Row:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        from unisono.training import GradientSync

        def model_of() -> Any:
            torch.manual_seed(0)
            return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

        inputs = torch.ones(1, WIDTH)

        def step_of(model: Any, finish: Callable[[], Any]) -> Callable[[], None]:
            def step() -> None:
                model(inputs).sum().backward()
                finish()
                for parameter in model.parameters():
                    parameter.grad = None

            return step

        model = model_of()
        sync = GradientSync(model, self.groups["unisono"])
        ways = {"GradientSync, unisono": step_of(model, sync.finish)}
        for name in ("unisono", "gloo"):
            wrapped = DistributedDataParallel(
                model_of(), process_group=self.groups[name], gradient_as_bucket_view=True
            )
            ways[f"DDP, {name}"] = step_of(wrapped, lambda: None)
        return self.measure("step", ways)

    def many(self) -> Row:
        import torch

        from unisono.training import GradientSync

        def gradients() -> list[Any]:
            made = [torch.nn.Parameter(torch.zeros(2560)) for _ in range(1000)]
            for parameter in made:
                parameter.grad = torch.zeros_like(parameter)
            return made

        def one_by_one(parameters: list[Any], group: Any) -> None:
            import torch.distributed as dist

            for parameter in parameters:
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad /= self.comm.size

        ways: dict[str, Callable[[], Any]] = {}
        for name, group in self.groups.items():
            ways[f"buckets, {name}"] = GradientSync(gradients(), group, overlap=False).finish
            ways[f"one by one, {name}"] = partial(one_by_one, gradients(), group)
        return self.measure("many", ways)


def be_a_rank(folder: str, only: Sequence[str], turns: int) -> list[dict[str, Any]]:
    rank = Rank(folder, turns)
    return [asdict(getattr(rank, part)()) for part in only]


def goals(rows: Sequence[Row]) -> list[str]:
    """Which goals are met."""
    wanted: list[tuple[str, str, float]] = []
    times = {name: time_ms for row in rows for name, time_ms in row.median_ms.items()}
    if "GradientSync, unisono" in times:
        wanted += [
            ("DDP, gloo", "GradientSync, unisono", 2.0),
            ("DDP, unisono", "GradientSync, unisono", 1.0),
        ]
    if "buckets, gloo" in times:
        wanted += [
            (f"one by one, {name}", f"buckets, {name}", 10.0) for name in ("unisono", "gloo")
        ]
    lines = []
    for slow, fast, least in wanted:
        ratio = times[slow] / times[fast]
        met = "met   " if ratio >= least else "MISSED"
        lines.append(f"  {met} {slow} / {fast}: {ratio:.2f}, at least {least:g}")
    return lines


def main(arguments: Sequence[str]) -> int:
    what, _, how = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=what, epilog=how, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--goals", action="store_true", help="say which goals are met or missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save all measurements")
    options = parser.parse_args(arguments)
    print(f"{options.ranks} ranks, {os.cpu_count()} cores ({platform.machine()}), median ms")
    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
        results = unisono.launch(
            be_a_rank, options.ranks, (folder, options.only, options.turns), threads=1
        )
    rows = [Row(**row) for row in results[0]]
    for row in rows:
        for name, time_ms in row.median_ms.items():
            print(f"  {name:26}{time_ms:12,.2f}")
    if options.goals:
        print("\n".join(["goals", *goals(rows)]))
    if options.json:
        facts = {"ranks": options.ranks, "cores": os.cpu_count(), "machine": platform.machine()}
        saved = {**facts, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(saved, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
