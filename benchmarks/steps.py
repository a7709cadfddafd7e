"""Training steps on unisono and on gloo, compared with the same steps without communication.

    python benchmarks/steps.py                        2 ranks, a minute
    python benchmarks/steps.py --ranks 4 --turns 20 --goals
    python benchmarks/steps.py --only ddp --json steps.json
    python benchmarks/steps.py --profile              what unisono.watch.profile() says of the steps

A model of 25 million parameters (24 times Linear(1024, 1024)) sees one row of input, so that a
step is mostly communication. ddp: the backward pass with DDP, with gradients that it copies (its
default) and with gradients that are views of its buckets; by `share_ddp_buckets`; by GradientSync;
and by no wrapper at all. fsdp: forward and backward with FSDP2, with its own buffers and with ours.
small: nothing but 300 blocking calls of 1 KiB, or 300 waits for such.

"nothing" is what the wrapper itself costs: DDP with a hook that communicates nothing, FSDP2 on a
group whose calls return at once. "more" is how much longer a variant takes than that in the same
turn: the communication that is not hidden. "one thread" is unisono on a group whose large calls use
one thread (UNISONO_COPY_THREADS=1). All variants run in the same processes and take turns, in an
order that is shuffled each time. A turn takes as long as its slowest rank. Figures are medians.

With --profile "truth" is how much longer a variant takes than "nothing", in the mean of the ranks.
"exposed" and "no core" are what the profile says; their sum, less that of "nothing", is what
communication costs by the profile, and "error" is how much that is from the truth, in percent of
the step. "cost" is how much longer a step takes while it is profiled, in percent: five turns
without a profile and five in one alternate, after one in it that does not count. "main" and "watch"
are how much more processor time the main thread and the watching thread take then, in percent of
the step. The last line has the medians of these over the variants, and what a profile takes to
begin and to end.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from two_backends import TwoBackends

import unisono
from unisono import variables
from unisono.watch.stacks import WATCHING

PARTS = ("ddp", "fsdp", "small")
SMALL_CALLS = 300
ROUNDS = 5
"""Turns in one profile that count."""
WIDTH, LAYERS = 1024, 24
NOTHING = "nothing"
ONE_THREAD = "one thread"


@dataclass(frozen=True)
class Row:
    """One variant of a mode ("views", say): its median, and how much longer it takes than the
    mode's step without communication; None: there is no such step."""

    mode: str
    way: str
    median_ms: float
    more_ms: float | None


@dataclass(frozen=True)
class ProfileRow:
    """What a profile says of a variant; times in ms, the rest in percent of the step."""

    mode: str
    way: str
    step_ms: float
    truth_ms: float
    exposed_ms: float
    no_core_ms: float
    error: float
    cost: float
    main: float
    watch: float

    def __str__(self) -> str:
        figures = list(asdict(self).values())[2:]
        return f"  {self.mode:8}{self.way:16}" + "".join(f"{figure:8.1f}" for figure in figures)


@dataclass(frozen=True)
class Way:
    """A step: what is done before the clock starts, and what it measures."""

    mode: str
    name: str
    forward: Callable[[], Any]
    rest: Callable[[Any], Any]
    parameters: tuple[Any, ...]


class Rank(TwoBackends):
    """One rank, and what is measured on it."""

    def __init__(self, folder: str, turns: int, threads: int, profiles: bool) -> None:
        import torch

        self.profiles = profiles
        if profiles:  # gloo's groups are watched from here on
            unisono.watch.start(hang_s=1e6)  # it says nothing of slow ranks
            unisono.watch.step()  # from here on DDP's forward passes are no steps
        super().__init__(folder)
        torch.set_num_threads(threads)
        os.environ[variables.COPY_THREADS.name] = "1"
        self.groups[ONE_THREAD] = torch.distributed.new_group(backend="unisono")
        del os.environ[variables.COPY_THREADS.name]
        self.turns = turns
        self.inputs = torch.ones(1, WIDTH)

    def measure(self, ways: Sequence[Way]) -> list[Any]:
        """Each variant's median, in turns; every rank returns the same figures."""
        for way in ways:
            for _ in range(3):  # DDP creates its buckets again after the first step
                self.time_ms(way)
        if self.profiles:
            return self.profile([way for way in ways if way.mode != "none"])
        times: dict[Way, list[float]] = {way: [] for way in ways}
        order, shuffler = list(ways), random.Random(1)
        gc.disable()
        for _ in range(self.turns):
            shuffler.shuffle(order)
            for way in order:
                times[way].append(self.slowest(self.time_ms(way)))
        gc.enable()
        floors = {way.mode: times[way] for way in ways if way.name == NOTHING}
        rows = []
        for way in ways:
            floor = floors.get(way.mode)
            differences = [a - b for a, b in zip(times[way], floor or [], strict=floor is not None)]
            more_ms = statistics.median(differences) if floor else None
            rows.append(Row(way.mode, way.name, statistics.median(times[way]), more_ms))
        return rows

    def profile(self, ways: Sequence[Way]) -> list[ProfileRow]:
        """What profiles say of the variants, on rank 0. A step's marks are at the beginning and the
        end of what is timed: every other step of a profile is between two of them."""
        times: dict[tuple[Way, bool], list[float]] = defaultdict(list)
        main_s: dict[tuple[Way, bool], list[float]] = defaultdict(list)
        watch_s: dict[tuple[Way, bool], list[float]] = defaultdict(list)
        steps: dict[Way, list[Any]] = {way: [] for way in ways}
        began_s, ended_s = [], []
        shuffler = random.Random(1)
        watching = next(t for t in threading.enumerate() if t.name == WATCHING)
        clock = time.pthread_getcpuclockid(watching.ident or 0)

        def measure(way: Way, mark: Callable[[], object], profiled: bool) -> None:
            main_began_s, watch_began_s = time.thread_time(), time.clock_gettime(clock)
            times[way, profiled].append(self.slowest(self.time_ms(way, mark)))
            main_s[way, profiled].append(time.thread_time() - main_began_s)
            watch_s[way, profiled].append(time.clock_gettime(clock) - watch_began_s)

        for _ in range(-(-self.turns // ROUNDS)):
            rounds = [way for _ in range(ROUNDS) for way in shuffler.sample(ways, len(ways))]
            for way in rounds:
                measure(way, lambda: None, False)
            self.comm.barrier()
            moment_s = time.perf_counter()
            with unisono.watch.profile() as profiles:
                began_s.append(time.perf_counter() - moment_s)
                for way in ways:
                    self.time_ms(way)
                for way in rounds:
                    measure(way, unisono.watch.step, True)
                unisono.watch.step()
                moment_s = time.perf_counter()
            ended_s.append(time.perf_counter() - moment_s)
            for profile in profiles:
                for step in profile.steps:
                    if step.step % 2 == 0:
                        steps[rounds[step.step // 2]].append(step)
            self.comm.barrier()
        if self.rank:
            return []

        def median_ms(way: Way, *names: str) -> float:
            sums = [sum(getattr(step, f"{name}_s") for name in names) for step in steps[way]]
            return statistics.median(sums) * 1e3

        floors = {way.mode: way for way in ways if way.name == NOTHING}
        rows = []
        for way in ways:
            floor, step_ms = floors[way.mode], median_ms(way, "wall")
            truth_ms = step_ms - median_ms(floor, "wall")
            parts = "exposed", "no_core"
            error_ms = median_ms(way, *parts) - median_ms(floor, *parts) - truth_ms
            ratios = [a / b for a, b in zip(times[way, True], times[way, False], strict=True)]
            percents = error_ms / step_ms, statistics.median(ratios) - 1
            main_more_s = statistics.median(main_s[way, True]) - statistics.median(
                main_s[way, False]
            )
            watch_more_s = statistics.mean(watch_s[way, True]) - statistics.mean(
                watch_s[way, False]
            )
            cpu = main_more_s * 1e3 / step_ms, watch_more_s * 1e3 / step_ms
            said_ms = (median_ms(way, part) for part in parts)
            figures = step_ms, truth_ms, *said_ms, *(100 * part for part in (*percents, *cpu))
            rows.append(ProfileRow(way.mode, way.name, *figures))
        begin_ms, end_ms = (1e3 * statistics.median(each) for each in (began_s, ended_s))
        costs = [
            f"{name} {statistics.median(getattr(row, name) for row in rows):.1f}"
            for name in ("cost", "main", "watch")
        ]
        print(
            f"  medians in %: {', '.join(costs)}; {begin_ms:.0f} ms to begin, {end_ms:.0f} to end"
        )
        return rows

    def time_ms(self, way: Way, mark: Callable[[], object] = lambda: None) -> float:
        before = way.forward()
        self.comm.barrier()
        mark()
        begin_s = time.perf_counter()
        way.rest(before)
        took_s = time.perf_counter() - begin_s
        mark()
        for parameter in way.parameters:
            parameter.grad = None
        return took_s * 1e3

    def model(self) -> Any:
        import torch

        torch.manual_seed(0)
        return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    def backward(self, mode: str, name: str, model: Any, finish: Any = None) -> Way:
        """A variant whose backward pass counts."""

        def rest(loss: Any) -> None:
            loss.backward()
            if finish is not None:
                finish()

        return Way(mode, name, lambda: model(self.inputs).sum(), rest, tuple(model.parameters()))

    # -- DDP ---------------------------------------------------------------------------------------

    def ddp(self) -> list[Any]:
        from unisono.training import GradientSync, share_ddp_buckets

        ways = [self.backward("none", "no wrapper", self.model())]
        for mode in ("copied", "views"):
            for name in (NOTHING, "gloo", "unisono", ONE_THREAD, "shared buckets"):
                model = self.wrapped(name, views=mode == "views")
                if name == NOTHING:
                    model.register_comm_hook(None, lambda _, bucket: leave(bucket))
                if name == "shared buckets":
                    share_ddp_buckets(model)
                ways.append(self.backward(mode, name, model))
        model = self.model()
        sync = GradientSync(model, self.groups["unisono"])
        ways.append(self.backward("none", "GradientSync", model, sync.finish))
        return self.measure(ways)

    def wrapped(self, name: str, views: bool) -> Any:
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(
            self.model(),
            process_group=self.groups.get(name, self.groups["unisono"]),
            gradient_as_bucket_view=views,
        )

    # -- FSDP2 -------------------------------------------------------------------------------------

    def fsdp(self) -> list[Any]:
        import torch.distributed as dist

        silent = dist.new_group(backend="unisono")
        move_nothing_in(silent)
        groups = {NOTHING: silent, **self.groups}
        ways = []
        for name in (NOTHING, "gloo", "unisono", ONE_THREAD, "shared buffers"):
            model = self.sharded(groups.get(name, groups["unisono"]))
            if name == "shared buffers":
                for module in (*model, model):
                    module.set_allocate_memory_from_process_group_for_comm(True)
            ways.append(self.whole("FSDP2", name, model))
        return self.measure(ways)

    def whole(self, mode: str, name: str, model: Any) -> Way:
        """A variant whose forward pass also counts: FSDP2 gathers parameters there."""

        def rest(_: None) -> None:
            model(self.inputs).sum().backward()

        return Way(mode, name, lambda: None, rest, tuple(model.parameters()))

    def sharded(self, group: Any) -> Any:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        mesh = DeviceMesh.from_group(group, "cpu")
        model = self.model()
        for layer in model:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    # -- small calls -------------------------------------------------------------------------------

    def small(self) -> list[Any]:
        import torch
        import torch.distributed as dist

        tensor = torch.ones(256)

        def call(group: Any) -> None:
            for _ in range(SMALL_CALLS):
                dist.all_reduce(tensor, group=group)

        def wait(group: Any) -> None:
            for _ in range(SMALL_CALLS):
                dist.all_reduce(tensor, group=group, async_op=True).wait()

        ways = []
        for mode, make in (("calls", call), ("waits", wait)):
            ways.append(Way(mode, NOTHING, lambda: None, lambda _: None, ()))
            ways += (
                Way(mode, name, functools.partial(self.groups.get, name), make, ())
                for name in ("gloo", "unisono")
            )
        return self.measure(ways)


def leave(bucket: Any) -> Any:
    """What a DDP hook that communicates nothing returns."""
    import torch

    future: Any = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def move_nothing_in(group: Any) -> None:
    """Have the calls that FSDP2 makes on a group return finished works at once."""

    from unisono.comm.work import FinishedWork

    def finish(output: Any, *_: Any, **__: Any) -> Any:
        return group._work(FinishedWork(), [output], group._completer)

    for name in ("all_gather_single", "reduce_scatter_single"):
        setattr(group, name, finish)
    group._allgather_base = group._reduce_scatter_base = finish  # torch before 2.13


def be_a_rank(
    folder: str, only: Sequence[str], turns: int, threads: int, profiles: bool
) -> list[dict[str, Any]]:
    rank = Rank(folder, turns, threads, profiles)
    return [asdict(row) for part in only for row in getattr(rank, part)()]


def goals(rows: Sequence[Row], ranks: int, cores: int) -> list[str]:
    """Which goals are met: those for 16 cores if most are idle."""
    if cores < 2 * ranks:
        return goals_without_idle_cores(rows, ranks)
    more = {(row.mode, row.way): row.more_ms for row in rows if row.more_ms is not None}
    lines = []
    for mode, way in more:
        if way not in ("unisono", "shared buckets", "shared buffers"):
            continue
        ours_ms, gloos_ms = more[mode, way], more[mode, "gloo"]
        limits = {"gloo's": gloos_ms} if mode == "copied" else {}
        if ranks == 2:
            limits["absolute"] = 4.0 if mode == "copied" else 9.0
        elif mode != "copied":
            limits["0.4 of gloo's"] = 0.4 * gloos_ms
        for what, limit_ms in limits.items():
            met = "met   " if ours_ms <= limit_ms else "MISSED"
            lines.append(
                f"  {met} {mode}, {way}: {ours_ms:.1f} more, at most {limit_ms:.1f} ({what})"
            )
    return lines


def goals_without_idle_cores(rows: Sequence[Row], ranks: int) -> list[str]:
    steps = {(row.mode, row.way): row.median_ms for row in rows}
    lines = []
    for mode, least in (("views", 2.0), ("FSDP2", 1.5)):
        if ranks == 2 and (mode, "gloo") in steps:
            ratio = steps[mode, "gloo"] / steps[mode, "unisono"]
            met = "met   " if ratio >= least else "MISSED"
            lines.append(f"  {met} {mode}: gloo / unisono {ratio:.1f}, at least {least}")
    return lines


def line(row: Row) -> str:
    more = f"{row.more_ms:10.1f}" if row.more_ms is not None else f"{'-':>10}"
    return f"  {row.mode:10}{row.way:18}{row.median_ms:10.1f}{more}"


def main(arguments: Sequence[str]) -> int:
    what, _, how = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=what, epilog=how, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="torch's, of each rank")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--goals", action="store_true", help="say which goals are met or missed")
    parser.add_argument("--profile", action="store_true", help="how true profiles are")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save all measurements")
    options = parser.parse_args(arguments)
    cores = len(os.sched_getaffinity(0))
    print(f"{options.ranks} ranks, {cores} cores ({platform.machine()}), median ms")
    if options.profile:
        heads = "step", "truth", "exposed", "no core", "error %", "cost %", "main %", "watch %"
        print(f"  {'':24}" + "".join(f"{head:>8}" for head in heads), flush=True)
    else:
        print(f"  {'':28}{'step':>10}{'more':>10}", flush=True)
    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
        results = unisono.launch(
            be_a_rank,
            options.ranks,
            (folder, options.only, options.turns, options.threads, options.profile),
            threads=options.threads,
        )
    rows = [(ProfileRow if options.profile else Row)(**row) for row in results[0]]
    print(*map(str if options.profile else line, rows), sep="\n")
    if options.goals and not options.profile:
        print("goals", *goals(rows, options.ranks, cores), sep="\n")
    if options.json:
        facts = {"ranks": options.ranks, "cores": cores, "machine": platform.machine()}
        saved = {**facts, "threads": options.threads, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(saved, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
