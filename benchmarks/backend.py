"""torch.distributed on unisono and on gloo, in turns in the same processes.

    python benchmarks/backend.py                    2 ranks, everything, some minutes
    python benchmarks/backend.py --ranks 4 --only calls
    python benchmarks/backend.py --only layers      what dist adds to a small call, some seconds
    python benchmarks/backend.py --goals --json backend.json

calls: `unisono bench` of collectives through torch.distributed, and of direct calls on the
Communicator, which shows what torch's own layers add. start: from init_process_group to
the first finished all_reduce. layers: small calls through torch.distributed on a Python backend
that does nothing, direct calls, and calls through torch.distributed on unisono; the last column is
what unisono takes beyond the empty backend, data and all. Every figure is the median over turns; a
turn takes as long as its slowest rank. The backends take turns; those of calls in an order that is
shuffled each time. steps.py measures whole training steps.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from two_backends import TwoBackends

import unisono
from unisono.bench import measure_run

KIB, MIB = 1024, 1024**2
LAYER_CALLS = 500
BACKENDS = ("unisono", "gloo")
CALLS = {
    ("all_reduce",): (8, 64 * KIB, MIB, 16 * MIB, 64 * MIB),
    ("all_gather", "reduce_scatter", "barrier"): (MIB, 64 * MIB),
}
NAMES = {"unisono-torch": "unisono", "unisono": "direct", "gloo": "gloo"}


@dataclass(frozen=True)
class Row:
    """What was done, how large it was, and each variant's median time."""

    what: str
    bytes: int
    median_us: dict[str, float]
    goal: float | None = None

    @property
    def ratio(self) -> float:
        """How many times longer gloo takes."""
        return self.median_us["gloo"] / self.median_us["unisono"]


class Rank(TwoBackends):
    """One rank, and what is measured on it."""

    def __init__(self, folder: str, turns: int) -> None:
        super().__init__(folder)
        self.folder, self.turns = folder, turns

    def tensor(self, nbytes: int) -> Any:
        import torch

        return torch.zeros(max(1, nbytes // 4))

    def start(self) -> list[Row]:
        """From init_process_group to the first finished all_reduce, in processes that are warm."""
        import torch.distributed as dist

        dist.destroy_process_group()
        times_us: dict[str, list[float]] = {name: [] for name in BACKENDS}
        for turn in range(self.turns + 1):
            for name in BACKENDS:
                path = os.path.join(self.folder, f"{name}-{turn}")
                begin_s = time.perf_counter()
                store = dist.FileStore(path, self.size)
                dist.init_process_group(name, store=store, rank=self.rank, world_size=self.size)
                dist.all_reduce(self.tensor(8))
                took_s = time.perf_counter() - begin_s
                dist.barrier()
                dist.destroy_process_group()
                if turn:  # the first one imports modules
                    times_us[name].append(took_s * 1e6)
        medians = {name: statistics.median(ts) for name, ts in times_us.items()}
        return [self.show(Row("start", 0, medians))]

    def layers(self) -> list[Row]:
        """Small calls by turns: an empty Python backend, the Communicator, unisono in torch."""
        import torch.distributed as dist

        ours, comm, empty = self.groups["unisono"], self.comm, make_empty_group()
        tensor = self.tensor(8)
        calls: dict[str, dict[str, Callable[[], object]]] = {
            "barrier": {
                "empty": lambda: dist.barrier(empty),
                "direct": comm.barrier,
                "unisono": lambda: dist.barrier(ours),
            },
            "all_reduce": {
                "empty": lambda: dist.all_reduce(tensor, group=empty),
                "direct": lambda: comm.all_reduce(tensor),
                "unisono": lambda: dist.all_reduce(tensor, group=ours),
            },
        }
        if self.rank == 0:
            heads = "".join(f"{head:>14}" for head in (*calls["barrier"], "ours - empty"))
            print(f"{'layers: median (min)':24}{'size':>9}{heads}", flush=True)
        return [self.layer(what, ways) for what, ways in calls.items()]

    def layer(self, what: str, ways: dict[str, Callable[[], object]]) -> Row:
        times_us: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(4 * self.turns):
            for name, call in ways.items():
                self.comm.barrier()
                begin_s = time.perf_counter()
                for _ in range(LAYER_CALLS):
                    call()
                took_s = time.perf_counter() - begin_s
                times_us[name].append(self.slowest(took_s) * 1e6 / LAYER_CALLS)
        medians = {name: statistics.median(ts) for name, ts in times_us.items()}
        least = {name: min(ts) for name, ts in times_us.items()}
        if self.rank == 0:
            shown = [f"{medians[name]:.2f} ({least[name]:.2f})" for name in ways]
            more = [figures["unisono"] - figures["empty"] for figures in (medians, least)]
            shown.append(f"{more[0]:.2f} ({more[1]:.2f})")
            print(f"{what:24}{'8 B':>9}" + "".join(f"{text:>14}" for text in shown), flush=True)
        return Row(f"layers of {what}", 8, medians)

    def show(self, row: Row) -> Row:
        if self.rank == 0:
            print(line(row), flush=True)
        return row


def make_empty_group() -> Any:
    """A group on a Python backend that does nothing: the least that torch.distributed takes."""
    import torch.distributed as dist

    class EmptyGroup(dist.ProcessGroup):
        name = "empty"

        def allreduce(self, tensors: Any, opts: Any = None) -> None:
            return None

        def barrier(self, opts: Any = None) -> None:
            return None

        def getBackendName(self) -> str:
            return "empty"

        def getGroupName(self) -> str:
            return self.name

        def setGroupName(self, name: str) -> None:
            self.name = name

        def setGroupDesc(self, description: str) -> None:
            pass

    def make(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return EmptyGroup(rank, size)

    dist.Backend.register_backend("empty", make, devices=["cpu"])
    return dist.new_group(backend="empty")


def line(row: Row) -> str:
    size = f"{row.bytes // MIB} MiB" if row.bytes >= MIB else f"{row.bytes} B" if row.bytes else "-"
    direct = row.median_us.get("direct")
    times = [row.median_us["unisono"], row.median_us["gloo"]]
    shown = "".join(f"{time_us:14,.1f}" for time_us in times)
    extra = f"{direct:14,.1f}" if direct is not None else f"{'-':>14}"
    return f"{row.what:24}{size:>9}{shown}{row.ratio:12.1f}{extra}"


def measure_calls(ranks: int, turns: int) -> list[Row]:
    """The results of `unisono bench` for direct calls and for those through torch."""
    times: dict[tuple[str, int], dict[str, float]] = {}

    for collectives, sizes in CALLS.items():
        run = measure_run(
            *collectives, sizes=sizes, ranks=ranks, backends=list(NAMES), budget_s=turns / 10
        )
        for row in run.rows:
            key = (row.collective, row.size_bytes)
            times.setdefault(key, {})[NAMES[row.backend]] = row.time_us.p50
    rows = [Row(what, nbytes, medians) for (what, nbytes), medians in times.items()]
    for row in rows:
        print(line(row), flush=True)
    return rows


def be_a_rank(folder: str, only: Sequence[str], turns: int) -> list[dict[str, Any]]:
    rank = Rank(folder, turns)
    rows: list[Row] = []
    for part in only:
        rows += getattr(rank, part)()
    return [asdict(row) for row in rows]


def goals(rows: Sequence[Row], ranks: int) -> list[str]:
    """Which goals are met."""
    wanted: list[tuple[str, float, float]] = []
    for row in rows:
        least: float | None = None
        if row.what == "all_reduce" and ranks == 2:
            least = 25 if row.bytes == 8 else 8 if row.bytes < MIB else 3
        elif row.what == "all_reduce" and row.bytes == 8:
            least = 20
        elif row.what in ("all_gather", "reduce_scatter") and ranks == 2:
            least = 4
        elif row.what == "barrier" and ranks == 2:
            least = 15
        elif row.what == "start" and ranks == 2:
            least = 1.0
        if least is not None:
            wanted.append((f"{row.what} {row.bytes} B: gloo/unisono", row.ratio, least))
    lines = [
        f"  {'met   ' if ratio >= least else 'MISSED'} {what} {ratio:.1f}, at least {least:g}"
        for what, ratio, least in wanted
    ]
    for row in rows:
        if row.what.startswith("layers") and ranks == 2:
            more_us = row.median_us["unisono"] - row.median_us["empty"]
            met = "met   " if more_us <= 4 else "MISSED"
            lines.append(f"  {met} {row.what}: us beyond an empty backend {more_us:.1f}, at most 4")
        if row.what == "all_reduce" and row.bytes == 8 and ranks == 2:
            more_us = row.median_us["unisono"] - row.median_us["direct"]
            met = "met   " if more_us <= 6 else "MISSED"
            lines.append(f"  {met} us more than the direct call {more_us:.1f}, at most 6")
    return lines


def main(arguments: Sequence[str]) -> int:
    what, _, how = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=what, epilog=how, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=("calls", "start", "layers"))
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--goals", action="store_true", help="say which goals are met or missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save all measurements")
    options = parser.parse_args(arguments)
    only = options.only or ["calls", "layers", "start"]
    print(f"{options.ranks} ranks, {os.cpu_count()} cores ({platform.machine()}), median us")
    heads = "".join(f"{head:>14}" for head in ("unisono", "gloo"))
    print(f"{'':24}{'size':>9}{heads}{'gloo/ours':>12}{'direct':>14}", flush=True)
    rows = measure_calls(options.ranks, options.turns) if "calls" in only else []
    rest = [part for part in only if part != "calls"]
    if rest:
        with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
            results = unisono.launch(
                be_a_rank, options.ranks, (folder, rest, options.turns), threads=1, on_line=show
            )
        rows += [Row(**row) for row in results[0]]
    if options.goals:
        print("\ngoals", *goals(rows, options.ranks), sep="\n")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    return 0


def show(rank: int, stream: str, text: str) -> None:
    """A line of a rank: rank 0's are the table's."""
    print(text, flush=True, file=sys.stdout if stream == "stdout" else sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
