"""Collectives over several hosts: flat gloo, unisono, Open MPI, and the limit of the link.

    sudo python benchmarks/hosts.py                          2 hosts x 2 ranks in blocks, 1 Gbit/s
    sudo python benchmarks/hosts.py --placement cyclic --sizes 67108864
    sudo python benchmarks/hosts.py --hosts 4 --ranks 2 --collectives all_reduce --no-ddp
    sudo python benchmarks/hosts.py --placement 3+1          so many ranks on each host
    sudo python benchmarks/hosts.py --goals --json hosts.json
    sudo python benchmarks/hosts.py --no-mpi                 where there is no mpirun and mpicc

Hosts are network namespaces of this machine, each with a cable of limited rate (tbf, burst 256 KB)
to a switch; this needs root. The same processes measure both backends, in rounds: in each round
each has its turn, after a barrier. A turn has several small calls, one after the other. Broadcasts
then come from two hosts in turn, because one root could begin the next before any rank has the one
before, and that would measure a rate instead of a latency. A figure is the median over the rounds
of the slowest rank's time. With --repeats, which starts new processes, it is the median of those;
/ gloo is that of the ratios, with the smallest and the largest. After each repeat Open MPI has its
turn, if it is installed: benchmarks/hosts_mpi.py tells how; it is called from C, without torch, and
/ MPI is unisono's time through torch.distributed over its time. A row in which unisono takes more
than 1.03 of the time of the faster of both, or from 4 MiB on more than 1.15 of the limit, is marked
with a star; --goals exits with 1 if there is one. CPU is the processor time of all ranks, compared
with gloo's. Link bytes are counted by the interface of the host that sent most, for
one call; it counts the headers of up to 64 KiB once, because packets are cut up behind it.

The limit is the least that a collective must send over one host's link, in the direction that
carries more, divided by the rate. With H hosts of R ranks, and S bytes in the whole tensor (what a
rank reduces, broadcasts, scatters or exchanges; what it has gathered), where hosts are of one size:

    all_reduce       2 (H-1)/H S     its reduced part from each other host, its result to each
    broadcast        S               the root's host must send it once, each other one receive it
    all_gather       (H-1)/H S       what the other hosts' ranks contribute
    reduce_scatter   (H-1)/H S       what the other hosts' ranks keep, reduced inside the host
    reduce           S               each host adds its own to what it passes on to the root's
    gather, scatter  (H-1)/H S       what the root's host lacks, or what the others do
    all_to_all       R (H-1)/H S     what each rank has for other hosts' ranks
    ping_pong        2 S             a message there and one back, between two ranks of two hosts
    barrier          0

times 1.05, because packets of 1514 bytes carry 1448 of data, and acknowledgements go the other way.
It is not a lower bound for small sizes: tbf lets 256 KB pass at once after a pause, so up to 1 MiB
a time may be below its limit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

HEADERS = 1.05
COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
ROOTED = ("reduce", "gather", "scatter")
PING_PONG, BARRIER, OPEN_MPI = "ping_pong", "barrier", "openmpi"
CALLS = (*COLLECTIVES, *ROOTED, PING_PONG, BARRIER)
KIB, MIB = 1024, 1 << 20
SIZES = (16, KIB, 64 * KIB, MIB, 4 * MIB, 64 * MIB)
DDP_LAYERS, DDP_WIDTH = 24, 1024  # 25 million parameters
DDP = "DDP step"
TO_PEER, TO_LIMIT = 1.03, 1.15
OPTIONS: dict[str, dict[str, Any]] = {"reproducible": {"reproducible": True}}
OPTIONS |= {wire: {"wire": wire} for wire in ("int8", "fp8", "bfloat16")}
"""Backends that are unisono with an option of all_reduce."""


@dataclass(frozen=True)
class Figure:
    """One row: milliseconds and link bytes of each backend, and the lower bounds."""

    what: str
    size_bytes: int
    limit_ms: float
    least_bytes: int
    milliseconds: dict[str, float]
    link_bytes: dict[str, int]
    cpu_milliseconds: dict[str, float]
    to_gloo: tuple[float, ...] = ()
    to_mpi: tuple[float, ...] = ()
    """How many times flat gloo's time unisono takes, and Open MPI's, in each repeat."""

    @classmethod
    def median_of(cls, repeats: Sequence[Figure]) -> Figure:
        """One figure of all repeats of it."""

        def middle(dicts: Sequence[dict[str, Any]]) -> dict[str, Any]:
            return {name: statistics.median(each[name] for each in dicts) for name in dicts[0]}

        def ratios(peer: str) -> tuple[float, ...]:
            times = [figure.milliseconds for figure in repeats]
            return tuple(ms["unisono"] / ms[peer] for ms in times if {"unisono", peer} <= ms.keys())

        return replace(
            repeats[0],
            milliseconds=middle([figure.milliseconds for figure in repeats]),
            link_bytes=middle([figure.link_bytes for figure in repeats]),
            cpu_milliseconds=middle([figure.cpu_milliseconds for figure in repeats]),
            to_gloo=ratios("gloo"),
            to_mpi=ratios(OPEN_MPI),
        )

    def faster_ms(self) -> float:
        """The time of the faster of gloo and Open MPI; 0 without one."""
        times = (self.milliseconds.get(peer, 0.0) for peer in ("gloo", OPEN_MPI))
        return min(filter(None, times), default=0.0)

    def misses(self) -> list[str]:
        """What it fails of: the faster peer's time, and from 4 MiB on the limit."""
        ours, faster = self.milliseconds.get("unisono"), self.faster_ms()
        missed = []
        if ours and faster and ours > TO_PEER * faster:
            missed.append(f"{ours / faster:.2f} of the faster peer's time, at most {TO_PEER}")
        if ours and self.size_bytes >= 4 * MIB and ours > TO_LIMIT * self.limit_ms > 0:
            missed.append(f"{ours / self.limit_ms:.2f} of the limit, at most {TO_LIMIT}")
        return missed


@dataclass(frozen=True)
class Setting:
    """What a run measures."""

    hosts: int = 2
    ranks: int = 2
    placement: str = "block"
    rate_bits_per_s: int = 1_000_000_000
    sizes: tuple[int, ...] = SIZES
    collectives: tuple[str, ...] = CALLS
    ddp: bool = True
    rounds: int = 0
    backends: tuple[str, ...] = ("gloo", "unisono")
    dtype: str = "float32"

    @property
    def counts(self) -> list[int]:
        """How many ranks each host has."""
        if "+" in self.placement:
            return [int(count) for count in self.placement.split("+")]
        return [self.ranks] * self.hosts

    def placed(self) -> list[int]:
        """The host of each rank."""
        if self.placement == "cyclic":
            return [rank % self.hosts for rank in range(self.hosts * self.ranks)]
        return [host for host, count in enumerate(self.counts) for _ in range(count)]

    @property
    def mate(self) -> int:
        """The first rank that is not on rank 0's host."""
        return self.placed().index(1)

    def sizes_of(self, call: str) -> tuple[int, ...]:
        """The sizes of a call."""
        return (0,) if call == BARRIER else self.sizes

    def rounds_of(self, size_bytes: int) -> int:
        """More for small sizes, whose times vary more."""
        return self.rounds or max(5, min(30, 20 * MIB // max(1, size_bytes)))


def calls_of(size_bytes: int) -> int:
    """How many calls a turn has: ranks leave a barrier one after the other, which takes as long
    as a single small call."""
    return 100 if size_bytes <= KIB else 20 if size_bytes <= 64 * KIB else 1


def parser_of(text: str) -> argparse.ArgumentParser:
    """What the measurements between emulated hosts have in common; `text` is the module's."""
    parser = argparse.ArgumentParser(
        description=text.partition("\n\n")[0],
        epilog=text.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="on each host")
    parser.add_argument("--placement", default="block", help="block, cyclic, or as 3+1")
    parser.add_argument("--rate", type=float, default=1.0, help="of each cable, in Gbit/s")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), metavar="BYTES")
    parser.add_argument("--collectives", nargs="+", default=list(CALLS), choices=CALLS)
    parser.add_argument("--rounds", type=int, default=0, help="for each size; else by the size")
    parser.add_argument("--repeats", type=int, default=1, help="of the whole, with new processes")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--backends",
        nargs="+",
        default=["gloo", "unisono"],
        help=f"{', '.join(OPTIONS)} are unisono with that option, for all_reduce",
    )
    parser.add_argument("--dtype", default="float32", help="of the collectives' tensors")
    parser.add_argument("--no-ddp", dest="ddp", action="store_false")
    parser.add_argument("--no-mpi", dest="mpi", action="store_false")
    parser.add_argument("--goals", action="store_true", help="compare the figures with the goals")
    options = parser.parse_args()
    if options.hosts < 2 or options.ranks < 1:
        parser.error("there must be 2 hosts or more, and a rank on each")
    setting = Setting(
        options.hosts,
        options.ranks,
        options.placement,
        int(options.rate * 1e9),
        tuple(options.sizes),
        tuple(options.collectives),
        options.ddp,
        options.rounds,
        tuple(options.backends),
        options.dtype,
    )
    by_turns = options.mpi and setting.dtype == "float32"
    repeats = [measure_with_mpi(setting, by_turns) for _ in range(options.repeats)]
    figures = [Figure.median_of(each) for each in zip(*repeats, strict=True)]
    show(setting, figures)
    show_briefly(figures)
    if options.json:
        data = {"setting": asdict(setting), "figures": [asdict(figure) for figure in figures]}
        options.json.write_text(json.dumps(data, indent=1) + "\n")
    if options.goals and not show_goals(figures):
        sys.exit(1)


# -- starting the ranks --------------------------------------------------------------------------


def measure_with_mpi(setting: Setting, with_mpi: bool) -> list[Figure]:
    """What `measure` returns, with Open MPI's times."""
    import hosts_mpi

    figures = measure(setting)
    if with_mpi and (lack := hosts_mpi.why_not()):
        print(f"Open MPI is left out: {lack}", file=sys.stderr)
    elif with_mpi:
        times = hosts_mpi.measure(setting)  # which has no DDP
        for figure in figures:
            if (ms := times.get((figure.what, figure.size_bytes))) is not None:
                figure.milliseconds[OPEN_MPI] = ms
    return figures


def measure(setting: Setting) -> list[Figure]:
    """Make the hosts, run the ranks, and return what rank 0 has measured."""
    sys.path.append(str(Path(__file__).parent.parent / "tests" / "hosts"))
    from namespaces import Link, network, start_ranks, why_not

    if why_not():
        sys.exit(f"left out: {why_not()}")
    link = Link(setting.rate_bits_per_s)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    environment |= {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    with (
        tempfile.TemporaryDirectory() as folder,
        network(len(setting.counts), link) as made,
    ):
        results = Path(folder) / "figures"
        told = json.dumps(asdict(setting) | {"results": str(results)})
        command = [sys.executable, __file__, "--setting", told]
        ranks = start_ranks(made.hosts, setting.placed(), command, Path(folder), environment)
        for rank in ranks:
            if rank.wait(3600.0):
                sys.exit(f"{rank.output.name} on {rank.host.name} failed:\n{rank.text()}")
            sys.stderr.write(rank.text())
        return [Figure(**figure) for figure in json.loads(results.read_text())]


# -- a rank --------------------------------------------------------------------------------------


@dataclass
class Bench:
    """One rank: its groups on each backend, and how it measures a call on them."""

    setting: Setting
    groups: dict[str, Any] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)

    def __post_init__(self) -> None:
        import torch
        import torch.distributed as dist

        from unisono.torch_backend import autoload

        warnings.simplefilter("ignore", FutureWarning)  # the names are those of every torch
        autoload.register()
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        for name in self.setting.backends:
            backend = "unisono" if name in OPTIONS else name
            self.groups[name] = dist.new_group(backend=backend) if name != "gloo" else None

    def run(self) -> None:
        """Measure everything."""
        for name in self.setting.collectives:
            for size_bytes in self.setting.sizes_of(name):
                calls = {
                    backend: make_call(name, size_bytes, self.rank, group, self.setting, backend)
                    for backend, group in self.groups.items()
                }
                self.add(name, size_bytes, calls)
        if self.setting.ddp:
            calls = {name: make_training_step(group) for name, group in self.groups.items()}
            size_bytes = DDP_LAYERS * DDP_WIDTH * (DDP_WIDTH + 1) * 4
            self.add(DDP, size_bytes, calls)

    def add(self, name: str, size_bytes: int, calls: dict[str, Callable[[], object]]) -> None:
        """Measure one operation on all backends in turn."""
        import torch
        import torch.distributed as dist

        rounds, count = self.setting.rounds_of(size_bytes), calls_of(size_bytes)
        seconds = torch.zeros(len(calls), rounds, dtype=torch.float64)
        sent, cpu = torch.zeros(2, len(calls), dtype=torch.float64)
        for _ in range(2):
            for call in calls.values():
                call()
        for turn in range(rounds):
            for number, call in enumerate(calls.values()):
                dist.barrier()
                before = sent_bytes()
                dist.barrier()
                began, began_cpu = time.perf_counter(), time.process_time()
                for _ in range(count):
                    call()
                seconds[number, turn] = (time.perf_counter() - began) / count
                cpu[number] += time.process_time() - began_cpu
                dist.barrier()
                sent[number] += sent_bytes() - before
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        dist.all_reduce(sent, dist.ReduceOp.MAX)
        dist.all_reduce(cpu)
        least = least_bytes("all_reduce" if name == DDP else name, size_bytes, self.setting)
        trips = 2 if name == PING_PONG else 1
        measured = rounds * count
        self.figures.append(
            Figure(
                name,
                size_bytes,
                1000 * 8 * trips * least * HEADERS / self.setting.rate_bits_per_s,
                least,
                {
                    backend: 1000 * statistics.median(seconds[number].tolist())
                    for number, backend in enumerate(calls)
                },
                {backend: int(sent[number]) // measured for number, backend in enumerate(calls)},
                {
                    backend: 1000 * cpu[number].item() / measured
                    for number, backend in enumerate(calls)
                },
            )
        )
        if self.rank == 0:
            print(describe(self.figures[-1]), flush=True)


def make_call(
    name: str, size_bytes: int, rank: int, group: Any, setting: Setting, backend: str
) -> Callable[[], object]:
    """One collective, or a message there and one back; on this backend, of which the group is."""
    import torch
    import torch.distributed as dist

    dtype, ranks = getattr(torch, setting.dtype), len(setting.placed())
    count = max(1, size_bytes // dtype.itemsize // ranks) * ranks
    exact = torch.zeros(max(1, size_bytes // dtype.itemsize), dtype=dtype)
    roots = itertools.cycle((0, setting.mate) if calls_of(size_bytes) > 1 else (0,))

    def play() -> None:
        if rank == 0:
            dist.send(exact, setting.mate, group=group)
            dist.recv(exact, setting.mate, group=group)
        elif rank == setting.mate:
            dist.recv(exact, 0, group=group)
            dist.send(exact, 0, group=group)

    if backend in OPTIONS and name == "all_reduce":
        return lambda: group.comm.all_reduce(exact, **OPTIONS[backend])
    whole, part = torch.zeros(count, dtype=dtype), torch.zeros(count // ranks, dtype=dtype)
    other = torch.zeros(count, dtype=dtype)
    rows = list(whole.chunk(ranks))

    def gather() -> None:
        root = next(roots)
        dist.gather(part, rows if rank == root else None, root, group=group)

    def scatter() -> None:
        root = next(roots)
        dist.scatter(part, rows if rank == root else None, root, group=group)

    return {
        "all_reduce": lambda: dist.all_reduce(exact, group=group),
        "broadcast": lambda: dist.broadcast(exact, next(roots), group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        "reduce": lambda: dist.reduce(exact, next(roots), group=group),
        "gather": gather,
        "scatter": scatter,
        PING_PONG: play,
        BARRIER: lambda: dist.barrier(group=group),
    }[name]


def make_training_step(group: Any) -> Callable[[], object]:
    """A step of DDP on a stack of linear layers."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    layers = [torch.nn.Linear(DDP_WIDTH, DDP_WIDTH) for _ in range(DDP_LAYERS)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    data = torch.randn(4, DDP_WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    return step


def sent_bytes() -> int:
    """How many bytes this host's interface has sent."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "eth0":
            return int(counts.split()[8])
    raise RuntimeError("this host has no eth0")


def least_bytes(name: str, size_bytes: int, setting: Setting) -> int:
    """What one host's link must carry one way, without headers."""
    counts, ranks = setting.counts, len(setting.placed())
    most = max((ranks - count) / ranks for count in counts)  # what a host has not
    rooted = (ranks - counts[0]) / ranks
    times = {
        "all_reduce": 2 * (len(counts) - 1) / len(counts),
        "broadcast": 1.0,
        "all_gather": most,
        "reduce_scatter": most,
        "all_to_all": max(count * (ranks - count) / ranks for count in counts),
        "reduce": 1.0,
        "gather": rooted,
        "scatter": rooted,
        PING_PONG: 1.0,
        BARRIER: 0.0,
    }
    return int(times[name] * size_bytes)


def be_a_rank(told: dict[str, Any]) -> None:
    import torch.distributed as dist

    results = told.pop("results")
    for key in ("sizes", "collectives", "backends"):
        told[key] = tuple(told[key])
    bench = Bench(Setting(**told))
    bench.run()
    if bench.rank == 0:
        Path(results).write_text(json.dumps([asdict(figure) for figure in bench.figures]))
    dist.barrier()
    dist.destroy_process_group()


# -- showing -------------------------------------------------------------------------------------


def describe(figure: Figure) -> str:
    times = ", ".join(f"{name} {ms:.2f} ms" for name, ms in figure.milliseconds.items())
    return f"{figure.what} of {figure.size_bytes:,} bytes: {times}, limit {figure.limit_ms:.2f} ms"


def show(setting: Setting, figures: Sequence[Figure]) -> None:
    """A table in Markdown."""
    rate = setting.rate_bits_per_s / 1e9
    print(f"\n{describe_hosts(setting)}, {rate:g} Gbit/s, {setting.dtype}\n")
    names = ["gloo", "unisono", *(name for name in setting.backends if name in OPTIONS)]
    names += [OPEN_MPI] if any(figure.to_mpi for figure in figures) else []
    columns = " | ".join(f"{name} ms" for name in names)
    print(
        f"| | bytes | limit ms | {columns} | / limit | / gloo | / MPI | CPU | link bytes / least |"
    )
    print("|---|---|---|" + "---|" * (len(names) + 5))
    for figure in figures:
        ours = figure.milliseconds.get("unisono")
        cpu = figure.cpu_milliseconds
        what = figure.what + ("*" if figure.misses() else "")
        cells = [what, f"{figure.size_bytes:,}", f"{figure.limit_ms:.3g}"]
        times = [figure.milliseconds.get(name) for name in names]
        cells += [f"{ms:.3g}" if ms else "-" for ms in times]
        cells += [f"{ours / figure.limit_ms:.2f}" if ours and figure.limit_ms > 1 else "-"]
        cells += [describe_ratios(figure.to_gloo), describe_ratios(figure.to_mpi)]
        cells += [f"{cpu['unisono'] / cpu['gloo']:.2f}" if figure.to_gloo else "-"]
        least = figure.least_bytes
        is_single = calls_of(figure.size_bytes) == 1  # the others count headers, or both ways
        sent = figure.link_bytes if is_single else {}
        cells += [", ".join(f"{name} {n / least:.2f}" for name, n in sent.items()) or "-"]
        print(f"| {' | '.join(cells)} |")


def show_briefly(figures: Sequence[Figure]) -> None:
    """A row for each call: at each size unisono's ms, and its ratio to the faster peer."""
    sizes = sorted({figure.size_bytes for figure in figures if figure.size_bytes})
    print("\n| | " + " | ".join(f"{size:,} B" for size in sizes) + " |")
    print("|---|" + "---|" * len(sizes))
    for what in dict.fromkeys(figure.what for figure in figures):
        cells = []
        for figure in figures:
            if figure.what != what:
                continue
            ours, star = figure.milliseconds.get("unisono"), "*" if figure.misses() else ""
            ratio = f", {ours / figure.faster_ms():.2f}" if ours and figure.faster_ms() else ""
            cells.append(f"{ours:.3g}{ratio}{star}" if ours else "-")
        print(f"| {what} | {' | '.join(cells)} |" + " |" * (len(sizes) - len(cells)))


def describe_hosts(setting: Setting) -> str:
    """How many ranks are where."""
    if "+" in setting.placement:
        return f"hosts of {setting.placement} ranks"
    return f"{setting.hosts} hosts x {setting.ranks} ranks, {setting.placement} order"


def describe_ratios(ratios: Sequence[float]) -> str:
    """Their median, with the smallest and the largest if there are several."""
    if not ratios:
        return "-"
    middle = f"{statistics.median(ratios):.2f}"
    return middle if len(ratios) == 1 else f"{middle} ({min(ratios):.2f} to {max(ratios):.2f})"


def show_goals(figures: Sequence[Figure]) -> bool:
    """Say which rows miss what; returns whether none does."""
    for figure in figures:
        for missed in figure.misses():
            print(f"MISSED  {figure.what} of {figure.size_bytes:,} bytes: {missed}")
    return not any(figure.misses() for figure in figures)


if __name__ == "__main__":
    if "--setting" in sys.argv:
        be_a_rank(json.loads(sys.argv[sys.argv.index("--setting") + 1]))
    else:
        main()
