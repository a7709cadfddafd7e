"""How long the collectives take: unisono, Open MPI and gloo, by turns in the same processes.

    python benchmarks/engine.py                      2 ranks, everything, about two minutes
    python benchmarks/engine.py --ranks 4 --quick    a first look
    python benchmarks/engine.py --goals --json engine.json --markdown engine.md

Every rank holds all libraries at once, and they work on the same float32 buffers. A row is measured
in blocks; in each block every library has one turn, in an order shuffled anew. A turn begins with
an untimed call, which brings the library's own memory back into the caches, and a barrier; then
follows one call or, up to 64 KiB and where it takes less than 100 us, as many back to back as fill
some milliseconds. A turn counts with the slowest rank's time; a figure is the median over all
turns. Each library's result is compared with the exact one before anything is timed. A row marked *
had other programs on its cores. Who spins suffers most then, and its ratios say nothing.

Sizes are nccl-tests': the tensor for all_reduce and broadcast, the whole output for all_gather, the
whole input for reduce_scatter and all_to_all, cut to the same number of elements for each rank.
Broadcast moves its root on with every call, so that no root runs ahead of its receivers
(--fixed-root keeps rank 0). An async all_reduce is timed from the call to the end of its wait. A
round trip is an isend and an irecv, each awaited, between neighbours 0 and 1, 2 and 3, and so on.
The floor is a local `a.add_(b)` of as many bytes on all ranks at once.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import shlex
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING

import figures
import peers
from figures import KIB, LIBRARIES, MIB, Results, Row
from libraries import Calls, Libraries

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI

SIZES = {
    "all_reduce": (8, 64, *(KIB * 4**power for power in range(10))),
    **dict.fromkeys(figures.MOVERS, (KIB, 64 * KIB, MIB, 64 * MIB)),
    "barrier": (0,),
    "async all_reduce": (8,),
    "round trip": (8, MIB),
}
BACK_TO_BACK_BYTES = 64 * KIB
SHORT_S = 100e-6
"""A call this long is timed alone: the mean of several would hide how far they lie apart."""
TURN_S = 0.003
"""About how long calls back to back go on."""
MEETING_S = 20e-6
"""How long a rank sleeps at a time until all ranks are through with a turn."""
TURNS_AT_MOST = 300
DISTURBED_SHARE = 0.1
"""A turn is disturbed if a rank wanted to run and had no core for so much of it."""
ELEMENT_BYTES = 4
NATIVE_PROGRAM = peers.REPOSITORY / "build" / "native" / "native_latency"


def buffers(
    collective: str, nbytes: int, size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(output, input, pattern of the whole size): small integers, whose sums are exact."""
    import torch

    count = max(1, nbytes // ELEMENT_BYTES)
    if collective == "round trip":
        output, input = torch.zeros(count), torch.zeros(count)
    elif collective not in ("all_gather", "reduce_scatter", "all_to_all"):
        output = torch.zeros(count)
        input = output
    else:
        part = max(1, count // size)
        count = part * size
        output = torch.zeros(part if collective == "reduce_scatter" else count)
        input = torch.zeros(part if collective == "all_gather" else count)
    pattern = torch.arange(count, dtype=torch.int32).remainder_(7).to(torch.float32)
    return output, input, pattern


def is_right(
    libraries: Libraries, collective: str, calls: Calls, tensors: Sequence[torch.Tensor]
) -> bool:
    """Whether one call on these `buffers` gives exactly what it should."""
    import torch

    rank, size = libraries.rank, libraries.size
    output, input, pattern = tensors
    output.fill_(-1)
    input.copy_(pattern[: input.numel()]).add_(rank + 1)
    calls[-1]()
    part = pattern.numel() // size
    mine = slice(rank * part, (rank + 1) * part)
    sum_of_ranks = size * (size + 1) // 2
    if collective in ("all_reduce", "async all_reduce"):
        return bool(torch.equal(output, pattern * size + sum_of_ranks))
    if collective == "round trip":
        neighbour = libraries.neighbour
        return neighbour is None or bool(torch.equal(output, pattern + neighbour + 1))
    if collective == "reduce_scatter":
        return bool(torch.equal(output, pattern[mine] * size + sum_of_ranks))
    if collective == "broadcast":
        return bool(torch.equal(output, pattern + libraries.roots[-1] + 1))
    if collective in ("all_gather", "all_to_all"):
        expected = pattern[mine] if collective == "all_to_all" else pattern[:part]
        received = enumerate(output.view(size, part))
        return all(torch.equal(got, expected + peer + 1) for peer, got in received)
    return True


class Turns:
    """Runs turns, all ranks together, and knows which of them other programs got in the way of."""

    def __init__(self, world: MPI.Intracomm) -> None:
        self.world = world
        try:
            self.scheduling = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # A kernel that does not count it.
            self.scheduling = -1

    def queued_ns(self) -> int:
        """How long this thread was ready to run and had no core, since it began."""
        return int(os.pread(self.scheduling, 64, 0).split()[1]) if self.scheduling >= 0 else 0

    def take(self, calls: Calls, count: int) -> tuple[float, float]:
        """(the time of one of `count` calls back to back, the share in which there was no core)."""
        todo = islice(cycle(calls), count)
        calls[0]()
        # From before the barrier on: a rank that leaves it late keeps the others waiting.
        queued_before_ns = self.queued_ns()
        self.world.Barrier()
        begin_ns = time.perf_counter_ns()
        for call in todo:
            call()
        took_ns = time.perf_counter_ns() - begin_ns
        queued_ns = self.queued_ns() - queued_before_ns
        # A rank that spun in what comes next would take a core from the others' last call.
        meeting = self.world.Ibarrier()
        while not meeting.Test():
            time.sleep(MEETING_S)
        return took_ns / count / 1e9, queued_ns / took_ns


def measure(
    libraries: Libraries, collective: str, nbytes: int, budget_s: float, turns_at_least: int
) -> Row:
    """Check and measure one row; every rank returns the same figures."""
    import numpy
    from mpi4py import MPI

    world, runner = libraries.world, Turns(libraries.world)
    tensors = output, input, pattern = buffers(collective, nbytes, libraries.size)
    turns: dict[str, Calls] = {}
    for library in libraries.names:
        turns[library] = libraries.calls(library, collective, output, input)
        if not is_right(libraries, collective, turns[library], tensors):
            what = f"{library}: {collective} of {nbytes} bytes"
            raise RuntimeError(f"{what} is wrong on rank {libraries.rank} of {libraries.size}")
    # Sums of zeros stay zero, however often they are taken in place.
    input.zero_()
    if collective == "all_reduce":
        turns["floor"] = [partial(output.add_, pattern.zero_())]

    def slowest_s(counts: Sequence[int]) -> list[float]:
        pairs = zip(turns.values(), counts, strict=True)
        times_s = numpy.array([runner.take(calls, count)[0] for calls, count in pairs])
        world.Allreduce(MPI.IN_PLACE, times_s, MPI.MAX)
        return [float(time_s) for time_s in times_s]

    counts = [1] * len(turns)
    estimates_s = slowest_s(counts)
    if nbytes <= BACK_TO_BACK_BYTES:
        for calls_at_most in (500, 20_000):  # The second time from calls back to back.
            tries = zip(*(slowest_s(counts) for _ in range(3)), strict=True)
            estimates_s = [min(times_s) for times_s in tries]
            fit = [min(calls_at_most, round(TURN_S / time_s)) for time_s in estimates_s]
            counts = [count if count > TURN_S / SHORT_S else 1 for count in fit]
    block_s = sum(time_s * (n + 1) for time_s, n in zip(estimates_s, counts, strict=True))
    blocks = max(turns_at_least, min(TURNS_AT_MOST, int(budget_s / block_s)))

    plan = list(zip(range(len(turns)), turns.values(), counts, strict=True))
    samples = numpy.zeros((len(turns), blocks, 2))
    shuffler = random.Random(nbytes)  # The same order on every rank.
    gc.disable()
    for block in range(blocks):
        shuffler.shuffle(plan)
        for index, calls, count in plan:
            samples[index, block] = runner.take(calls, count)
    gc.enable()
    world.Allreduce(MPI.IN_PLACE, samples, MPI.MAX)

    row = Row(collective, nbytes, blocks)
    for index, library in enumerate(turns):
        times_s, queued_shares = samples[index].T
        quartiles_us = numpy.percentile(times_s * 1e6, (25, 50, 75))
        low, row.median_us[library], high = (float(time_us) for time_us in quartiles_us)
        row.quartiles_us[library] = (low, high)
        # gloo's own threads compete with one another, and ranks that share a core do anyway.
        if library != "gloo" and libraries.size <= peers.usable_cores():
            row.disturbed_share[library] = float(numpy.mean(queued_shares > DISTURBED_SHARE))
    return row


def idle_percent(libraries: Libraries, wait_s: float = 1.0) -> dict[str, float]:
    """How much of a core rank 0 uses while it waits in a barrier for ranks that sleep.

    "asleep" is the same second outside any call: what the libraries' threads use on their own.
    """
    import torch

    percents = {}
    nothing = torch.zeros(1)
    for library in ("asleep", *libraries.names):
        asleep = library == "asleep"
        calls = [] if asleep else libraries.calls(library, "barrier", nothing, nothing)
        libraries.world.Barrier()
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        if asleep or libraries.rank != 0:
            time.sleep(wait_s)
        for call in calls:
            call()
        used_s = time.process_time() - begin_cpu_s
        percents[library] = 100 * used_s / (time.perf_counter() - begin_s)
    return percents


def measure_all(options: argparse.Namespace, world: MPI.Intracomm) -> None:
    """What one rank does: measure everything asked for; rank 0 shows each row as it comes."""
    import torch

    torch.set_num_threads(1)
    libraries = Libraries(options.libraries, world, Path(options.inside), options.fixed_root)

    def show(text: str) -> None:
        if world.rank == 0:
            print(text, flush=True)

    facts = peers.facts() | {
        "ranks": str(options.ranks),
        "size": "the tensor; all_gather: whole output; reduce_scatter, all_to_all: whole input",
        "broadcast": "from rank 0" if options.fixed_root else "from each rank in turn",
    }
    show("\n".join(f"{name}: {value}" for name, value in facts.items()) + "\n")
    show(figures.plain_line(figures.HEADINGS))
    budget_s, turns_at_least = (0.5, 3) if options.quick else (2.5, 7)
    rows: list[Row] = []
    for collective in options.collectives:
        fixed = collective in ("barrier", "async all_reduce")
        sizes = SIZES[collective] if fixed else options.sizes
        for nbytes in sizes or SIZES[collective]:
            rows.append(measure(libraries, collective, nbytes, budget_s, turns_at_least))
            show(figures.plain_line(figures.cells(rows[-1])))
    results = Results(facts, options.ranks, peers.usable_cores(), rows, idle_percent(libraries))
    show(figures.summary(results, options.goals))
    if world.rank == 0 and options.json:
        figures.save_json(results, options.json)
    if world.rank == 0 and options.markdown:
        figures.save_markdown(results, options.markdown)
    libraries.close()


def run_rank(options: argparse.Namespace) -> None:
    """Be one of the ranks that mpirun started."""
    import mpi4py

    if options.mpi_thread_level:
        mpi4py.rc.thread_level = options.mpi_thread_level
    from mpi4py import MPI

    try:
        measure_all(options, MPI.COMM_WORLD)
    except BaseException as error:
        # The others would wait for this rank forever.
        if not isinstance(error, KeyboardInterrupt):
            traceback.print_exc()
            sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)


def show_native(ranks: int) -> None:
    """What the engine takes inside C, so that Python's share is visible."""
    if not NATIVE_PROGRAM.exists():
        raise peers.PeersError(f"{NATIVE_PROGRAM} is not there: `make latency` builds it")
    print("\nall_reduce inside C (0 bytes: barrier): ranks, bytes, median ns", flush=True)
    subprocess.run([str(NATIVE_PROGRAM), str(ranks)], check=True)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    def names(known: Sequence[str]) -> Callable[[str], list[str]]:
        def split(text: str) -> list[str]:
            for name in (chosen := text.split(",")):
                if name not in known:
                    raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(known)}")
            return chosen

        return split

    what, _, how = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=what, epilog=how, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, default=2)
    add("--quick", action="store_true", help="fewer turns a row")
    add("--libraries", type=names(LIBRARIES), default=list(LIBRARIES), metavar="A,B")
    add("--collectives", type=names(tuple(SIZES)), default=list(SIZES), metavar="A,B")
    add("--sizes", type=figures.parse_sizes, metavar="8,64KiB", help="these for every collective")
    add("--fixed-root", action="store_true", help="broadcast from rank 0 alone")
    add("--goals", action="store_true", help="say which goals are met and which are missed")
    add("--json", type=Path, metavar="FILE", help="save everything measured")
    add("--markdown", type=Path, metavar="FILE", help="save the table")
    add("--native", action="store_true", help="also show the engine's times inside C")
    add("--no-setup", action="store_true", help="use this interpreter's own mpi4py or fail")
    add("--mpirun-options", type=shlex.split, default=[], metavar="'...'", help="more for mpirun")
    add("--mpi-thread-level", choices=("single", "funneled", "serialized", "multiple"))
    add("--limit-s", type=float, default=1800.0, help="give up after so many seconds")
    add("--inside", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> int:
    options = parse(sys.argv[1:])
    if options.inside:
        run_rank(options)
        return 0
    try:
        found = peers.find()
        if found is None and options.no_setup:
            raise peers.PeersError("--no-setup, but mpi4py or mpirun is missing here")
        script, more = [__file__, *sys.argv[1:], "--inside"], options.mpirun_options
        chosen = found or peers.set_up()
        status = peers.start(chosen, options.ranks, more, script, options.limit_s)
        if options.native and status == 0:
            show_native(options.ranks)
        return status
    except peers.PeersError as error:
        print(f"engine.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
