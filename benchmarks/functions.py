"""What the functions cost compared with the Communicator.

    python benchmarks/functions.py                  2 and 4 ranks, less than a minute
    python benchmarks/functions.py --ranks 2 --json functions.json

call: unisono.all_reduce of 8 bytes against comm.all_reduce. layers: torch.distributed.all_reduce
against comm.all_reduce, and against a process group that does nothing, which leaves torch's own
layers. ragged: unisono.all_gather, which exchanges shapes, against comm.all_gather of even parts
with the same total bytes; both make a list of new tensors. structure: a dict of 1,000 tensors of 40
bytes in one unisono.all_reduce against torch.distributed.all_reduce of each, on unisono and on
gloo, and against comm.all_reduce of each. Every figure is the median over turns; a turn takes as
long as its slowest rank, and the variants take turns.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import unisono

KIB, MIB = 1024, 1024**2
PARTS = ("call", "layers", "ragged", "structure")
TURN_S = 0.02
"""About how long one variant runs before another has its turn."""


@dataclass(frozen=True)
class Row:
    """What was done on how many ranks, and the median times of unisono and of the baseline."""

    what: str
    ranks: int
    ours_us: float
    baseline_us: float
    goal: str = ""
    met: bool = True

    def __str__(self) -> str:
        figures = (self.ours_us, self.baseline_us, self.ours_us - self.baseline_us)
        times = "".join(f"{figure:12,.2f}" for figure in figures)
        ratio = self.ours_us / self.baseline_us
        goal = f"  {'met' if self.met else 'MISSED'}: {self.goal}" if self.goal else ""
        return f"{self.what:<34}{self.ranks:>6}{times}{ratio:9.2f}{goal}"


class Rank:
    """One rank, and what is measured on it."""

    def __init__(self, turns: int) -> None:
        import torch

        torch.set_num_threads(1)
        self.turns = turns
        self.comm = unisono.init()

    def medians(self, ours: Callable[[], Any], baseline: Callable[[], Any]) -> tuple[float, float]:
        """The median microseconds of both variants; every rank returns the same."""
        ways = (ours, baseline)
        counts = []
        for way in ways:
            for _ in range(3):
                way()
            took_s = self.timed(way, 1)
            counts.append(max(1, min(5000, round(TURN_S / max(took_s, 1e-6)))))
        count = min(counts)
        times: tuple[list[float], list[float]] = ([], [])
        gc.disable()
        for turn in range(self.turns):
            for which in (0, 1) if turn % 2 else (1, 0):
                times[which].append(self.timed(ways[which], count) / count * 1e6)
        gc.enable()
        return statistics.median(times[0]), statistics.median(times[1])

    def timed(self, way: Callable[[], Any], count: int) -> float:
        import numpy

        way()
        self.comm.barrier()
        begin_s = time.perf_counter()
        for _ in range(count):
            way()
        slowest = numpy.array([time.perf_counter() - begin_s])
        self.comm.all_reduce(slowest, "max")
        return float(slowest[0])

    def call(self) -> list[Row]:
        import torch

        x, comm, function = torch.zeros(2), self.comm, unisono.all_reduce
        method = comm.all_reduce
        ours, baseline = self.medians(lambda: function(x), lambda: method(x))
        goal = ours - baseline <= 1.0
        return [Row("all_reduce, 8 B", comm.size, ours, baseline, "at most 1 us more", goal)]

    def layers(self) -> list[Row]:
        """The time of a call through torch.distributed compared with the direct one, and torch's
        own share of it, measured with a process group that does nothing."""
        import torch
        import torch.distributed as dist

        class Nothing(dist.ProcessGroup):
            def allreduce(self, tensors: Any, options: Any) -> None:
                return None

        x, method, size = torch.zeros(2), self.comm.all_reduce, self.comm.size
        ours, nothing = dist.new_group(backend="unisono"), Nothing(self.comm.rank, size)
        through, direct = self.medians(lambda: dist.all_reduce(x, group=ours), lambda: method(x))
        torch_alone, _ = self.medians(lambda: dist.all_reduce(x, group=nothing), lambda: method(x))
        goal = through - direct <= 6.0
        return [
            Row("dist.all_reduce, 8 B", size, through, direct, "at most 6 us more", goal),
            Row("  torch's layers alone", size, torch_alone, direct),
        ]

    def ragged(self) -> list[Row]:
        import torch

        comm, rows = self.comm, []
        for nbytes in (64, 4 * KIB, 64 * KIB, MIB, 4 * MIB):
            count = nbytes // 4
            even = torch.zeros(count)
            mine = torch.zeros(2 * count * (comm.rank + 1) // (comm.size + 1))

            def gather_even(even: torch.Tensor = even) -> list[torch.Tensor]:
                outputs = [torch.empty_like(even) for _ in range(comm.size)]
                comm.all_gather(outputs, even)
                return outputs

            ours, baseline = self.medians(lambda mine=mine: unisono.all_gather(mine), gather_even)
            what = f"ragged all_gather, {size_text(nbytes)} per rank"
            goal = "at most 1.5 times" if nbytes <= 64 * KIB else ""
            rows.append(Row(what, comm.size, ours, baseline, goal, ours <= 1.5 * baseline))
        return rows

    def structure(self) -> list[Row]:
        import torch

        tree = {f"layer.{i}.weight": torch.zeros(10) for i in range(1000)}
        tensors = list(tree.values())
        rows = []
        for name in ("unisono", "gloo"):
            group = torch.distributed.new_group(backend=name)

            def one_by_one(group: Any = group) -> None:
                for tensor in tensors:
                    torch.distributed.all_reduce(tensor, group=group)

            def together(group: Any = group) -> None:
                unisono.all_reduce(tree, group=group)

            ours, baseline = self.medians(together, one_by_one)
            what = f"1,000 tensors of 40 B, {name}"
            met = 10 * ours <= baseline
            rows.append(Row(what, self.comm.size, ours, baseline, "at least 10 times faster", met))

        def directly() -> None:
            for tensor in tensors:
                self.comm.all_reduce(tensor)

        ours, baseline = self.medians(lambda: unisono.all_reduce(tree), directly)
        what, goal = "1,000 tensors of 40 B, direct calls", "no slower"
        return [*rows, Row(what, self.comm.size, ours, baseline, goal, ours <= baseline)]


def size_text(nbytes: int) -> str:
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def be_a_rank(turns: int, only: Sequence[str]) -> list[dict[str, Any]]:
    rank = Rank(turns)
    rows = [row for part in only for row in getattr(rank, part)()]
    return [asdict(row) for row in rows]


def main(arguments: Sequence[str]) -> int:
    what, _, how = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=what, epilog=how, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--turns", type=int, default=21)
    parser.add_argument("--json", type=Path, metavar="FILE", help="save all measurements")
    options = parser.parse_args(arguments)
    print(f"{os.cpu_count()} cores ({platform.machine()}), median us")
    heads = "".join(f"{head:>12}" for head in ("ours", "baseline", "more"))
    print(f"{'':34}{'ranks':>6}{heads}{'ratio':>9}", flush=True)
    rows = []
    for ranks in options.ranks:
        made = unisono.launch(be_a_rank, ranks, (options.turns, options.only), threads=1)[0]
        rows += [Row(**row) for row in made]
        print(*rows[-len(made) :], sep="\n", flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
