"""A run: its ranks are started, or exist already; they meet, connect the backends and measure row
by row, and rank 0 reports events."""

import dataclasses
import json
import os
import socket
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy

from unisono.bench import machine
from unisono.bench.measurer import Control, Measurer
from unisono.bench.results import Row, Run, SampleSummary, Skipped
from unisono.bench.settings import MEMORY_SHARE, BenchSettings
from unisono.comm.communicator import Communicator
from unisono.comm.engine import show_files
from unisono.comm.hosts.hosts_transport import HostsTransport
from unisono.comm.meeting.network import find_interface
from unisono.errors import UnisonoError
from unisono.launcher import share
from unisono.launcher.functions import launch
from unisono.plan.predict import fit
from unisono.plan.sizes import format_size
from unisono.torch_support import require_torch
from unisono.world import world as worlds
from unisono.world.environment import RankInfo, read_rank_info

Event: TypeAlias = "dict[str, Any]"
Listener: TypeAlias = Callable[[Event], None]

MARK = "\x1eunisono-bench "
"""The prefix of the lines in which rank 0 reports to the process that started it."""
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def find_ranks() -> RankInfo | None:
    """This process among existing ranks: those of its world, or those that torchrun, `unisono run`
    or mpirun has started; None if it is alone."""
    if worlds.is_begun():
        world = worlds.resolve()
        return RankInfo(world.rank, world.size) if world.size > 1 else None
    info = read_rank_info()
    # A Slurm batch script also has srun's variables, but is not a rank.
    if info is not None and info.launcher != "srun":
        return info
    if "PMIX_RANK" in os.environ:
        raise UnisonoError("this mpirun does not tell its ranks their numbers")
    return None


def run(
    settings: BenchSettings,
    listener: Listener,
    others: Callable[[str], None],
    *,
    everywhere: bool = False,
) -> None:
    """Measure on the existing ranks, else on new ones, which end with the run. `listener` gets the
    events, on rank 0 or `everywhere`; `others` gets other output of new ranks."""
    require_torch("unisono bench")
    if find_ranks() is not None:
        run_rank(settings, listener, everywhere=everywhere)
        return

    def handle_line(rank: int, stream: str, text: str) -> None:
        before, mark, event = text.partition(MARK)
        if mark:
            listener(json.loads(event))
        if before:
            others(before)

    launch(_run_new_rank, settings.ranks, (settings,), threads=1, on_line=handle_line)


def _run_new_rank(settings: BenchSettings) -> None:
    """On a rank that `run` has started: events are lines of its stdout."""
    run_rank(settings, lambda event: print(MARK + json.dumps(event), flush=True))


def apply_event(run: Run | None, event: Event) -> Run:
    if event["event"] == "begin":
        skipped = [Skipped(**skipped) for skipped in event["skipped"]]
        return Run(event["machine"], event["versions"], event["settings"], skipped=skipped)
    if run is None:
        raise ValueError("results arrived before the event that starts the run")
    if event["event"] == "rows":
        run.rows += [Row.from_dict(row) for row in event["rows"]]
        known = {skipped.what for skipped in run.skipped}  # reported once for all sizes
        run.skipped += [Skipped(**new) for new in event["skipped"] if new["what"] not in known]
    elif event["event"] == "end":
        run.finished = True
    return run


# -- on each rank ------------------------------------------------------------------------------


def run_rank(
    settings: BenchSettings, listener: Listener | None, *, everywhere: bool = False
) -> None:
    """Take part in a run. `listener` gets the events, on rank 0 or `everywhere`."""
    from unisono.bench.backends.connect import Connector, take_gpu  # they need torch

    show_files(str(Path(__file__).parent))
    with ExitStack() as closing:
        closing.enter_context(_process_as_it_was())
        comm = _own_group(closing.enter_context(_joined_world()))
        closing.callback(comm.close)

        def emit(kind: str, **values: Any) -> None:
            if listener is not None and (everywhere or comm.rank == 0):
                listener({"event": kind, **values})

        hosts, interface = _hosts_of(comm)
        neighbours = next(ranks for _, ranks in hosts if comm.rank in ranks)
        control = Control(comm, same_clock=len(hosts) == 1)
        device = "cpu" if settings.device == "cpu" else take_gpu(neighbours.index(comm.rank))
        if device != "cpu":
            _check_gpu_memory(control, settings, device, len(neighbours))
        if interface:  # over hosts torch often guesses the loopback
            os.environ.setdefault(GLOO_INTERFACE, interface)
        connector = Connector(control, neighbours, device, closing)
        backends, left_out = connector.connect(settings.backends, settings.algorithms)
        emit(
            "begin",
            machine=machine.machine()
            | machine.describe_gpu(device)
            | {"hosts": [{"name": name, "ranks": len(ranks)} for name, ranks in hosts]},
            versions=machine.versions(),
            settings=dataclasses.asdict(settings),
            skipped=[dataclasses.asdict(backend) for backend in left_out],
        )
        measurer = Measurer(
            control,
            backends,
            budget_s=settings.budget_s,
            with_floor=settings.floor and len(hosts) == 1,
            crowded=settings.ranks > share.core_count() * len(hosts),
        )
        forecast = Forecast()
        cases = settings.cases(machine.caches_bytes()) if backends else []
        for number, (case, calibrates) in enumerate(cases):
            name = case.collective.name
            emit("next", what=case.where, collective=name, done=number, of=len(cases))
            rows, skipped = measurer.measure(case)
            if calibrates:
                if any(row.disturbed for row in rows):
                    # It would distort all expected times.
                    again, _ = measurer.measure(case)
                    rows = min(rows, again, key=lambda of: sum(row.disturbed_share for row in of))
                forecast.learn(rows)
            # The model sees only calibration rows: its expectation of others is independent.
            rows = [forecast.expect(row, calibrates) for row in rows]
            emit(
                "rows",
                rows=[row.as_dict() for row in rows],
                skipped=[dataclasses.asdict(backend) for backend in skipped],
            )
        emit("end")


@contextmanager
def _joined_world() -> Iterator[Communicator]:
    """The world of this process; if launched ranks have not met, a temporary one."""
    if worlds.is_begun():
        yield worlds.resolve()
        return
    try:
        yield worlds.init("unisono", with_torch=True)
    finally:
        worlds.shutdown()


def _own_group(world: Communicator) -> Communicator:
    """All ranks of a world in a group of our own, apart from the program's calls."""
    if world.backend == "unisono":
        group = world.split(range(world.size), "bench")
        assert group is not None
        return group
    from torch.distributed.distributed_c10d import _get_default_store

    return Communicator.join("unisono bench", world.rank, world.size, _get_default_store())


def _hosts_of(comm: Communicator) -> tuple[list[tuple[str, tuple[int, ...]]], str]:
    """The name and the ranks of each host, and this host's interface to the others."""
    if not isinstance(comm.transport, HostsTransport):
        return [(socket.gethostname(), tuple(range(comm.size)))], "lo"
    hosts = comm.transport.links.hosts
    return list(zip(hosts.names, hosts.members, strict=True)), find_interface(hosts.address)


@contextmanager
def _process_as_it_was() -> Iterator[None]:
    """Run torch with one thread for the time of a run, and restore gloo's interface afterwards."""
    import torch

    threads, interface = torch.get_num_threads(), os.environ.get(GLOO_INTERFACE)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if interface is None:
            os.environ.pop(GLOO_INTERFACE, None)


def _check_gpu_memory(
    control: Control, settings: BenchSettings, device: str, ranks_here: int
) -> None:
    """Raise UnisonoError on all ranks if the largest row does not fit into a GPU's memory."""
    import torch

    free_bytes, _ = torch.cuda.mem_get_info(device)
    everyone = control.gather(numpy.array([float(free_bytes)]))[:, 0]
    need, what = settings.memory_bytes()
    sharing = -(-ranks_here // torch.cuda.device_count())
    need_here = need / settings.ranks * sharing
    room = MEMORY_SHARE * float(everyone.min())
    if need_here > room:
        raise UnisonoError(
            f"{what} on {sharing} ranks of a GPU needs about {format_size(need_here)}B of its "
            f"memory, but only {format_size(room)}B may be used: choose smaller sizes"
        )


class Forecast:
    """The expected time of each row, by models fitted to the calibration rows of the same run."""

    def __init__(self) -> None:
        self._times: defaultdict[tuple[str, str], dict[int, SampleSummary]] = defaultdict(dict)

    def learn(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._times[_series(row)][row.size_bytes] = row.time_us

    def expect(self, row: Row, calibrates: bool) -> Row:
        """The row with its expected time, from calibration rows only."""
        if calibrates:
            return dataclasses.replace(row, calibrates=True)
        times = self._times.get(_series(row))
        if not times:
            return row

        def expect_us(quartile: str) -> float:
            model = fit({size: getattr(us, quartile) / 1e6 for size, us in times.items()})
            return model.predict_s(row.size_bytes) * 1e6

        us = [expect_us(quartile) for quartile in ("p25", "p50", "p75")]
        return dataclasses.replace(
            row, expected_us=us[1], expected_low_us=min(us), expected_high_us=max(us)
        )


def _series(row: Row) -> tuple[str, str]:
    return row.backend, row.collective
