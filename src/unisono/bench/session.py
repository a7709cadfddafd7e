"""A run on its ranks: connect, measure row by row, emit events on rank 0."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from unisono.bench import machine
from unisono.bench.connect import connect, process_as_it_was
from unisono.bench.devices import describe_gpu
from unisono.bench.forecast import Forecast, held_out_error
from unisono.bench.kept_models import ENOUGH_SIZES, KeptModels
from unisono.bench.measurer import Measurer
from unisono.bench.meeting import FolderMeeting, Meeting
from unisono.bench.results import Row, Run, Skipped, model_from_json, row_from_json, row_to_json
from unisono.bench.settings import BenchSettings
from unisono.comm.engine import show_files
from unisono.launcher import share

Event: TypeAlias = "dict[str, Any]"
Listener: TypeAlias = Callable[[Event], None]

MARK = "\x1eunisono-bench "
"""Begins the lines in which rank 0 tells the process that started it."""


@process_as_it_was()
def run_rank(
    meeting: Meeting,
    settings: BenchSettings,
    listener: Listener | None,
    *,
    everywhere: bool = False,
) -> None:
    """Take part in a run. `listener` gets the events, on rank 0 or `everywhere`."""

    def emit(kind: str, **values: Any) -> None:
        if listener is not None and (everywhere or meeting.rank == 0):
            listener({"event": kind, **values})

    begin_s = time.perf_counter()
    show_files(str(Path(__file__).parent))
    connected = connect(meeting, settings)
    limit = connected.link_limit
    facts = machine.machine() | describe_gpu(connected.device)
    facts |= {} if limit is None else limit.facts()
    emit(
        "begin",
        machine=facts,
        versions=machine.versions(),
        settings=settings.as_dict(),
        skipped=[dataclasses.asdict(backend) for backend in connected.skipped],
    )
    measurer = Measurer(
        connected.control,
        connected.backends,
        budget_s=settings.budget_s,
        over=settings.over,
        with_floor=settings.floor,
        crowded=settings.ranks > share.core_count() * (1 if limit is None else len(limit.hosts)),
        link_limit=limit,
    )
    kept = (
        None if settings.fresh else KeptModels(settings, 1 if limit is None else len(limit.hosts))
    )
    is_short = len(settings.sizes_bytes) < ENOUGH_SIZES
    forecast = Forecast(kept if is_short else None)
    everything: list[Row] = []
    cases = settings.cases(machine.caches_bytes()) if connected.backends else []
    for number, (case, calibrates) in enumerate(cases):
        emit("next", what=case.where, collective=case.collective.name, done=number, of=len(cases))
        rows, skipped = measurer.measure(case)
        if calibrates:
            if any(row.disturbed for row in rows):
                # All expected times would suffer from it.
                again, _ = measurer.measure(case)
                rows = min(rows, again, key=lambda them: sum(row.disturbed_share for row in them))
            forecast.learn(rows)
        # The model knows calibration rows alone: what it says of others does not depend on them.
        rows = [forecast.expect(row, calibrates) for row in rows]
        everything += rows
        emit(
            "rows",
            rows=[row_to_json(row) for row in rows],
            skipped=[dataclasses.asdict(backend) for backend in skipped],
        )
    if kept is not None and meeting.rank == 0:
        kept.keep(everything)
    emit(
        "end",
        models=[dataclasses.asdict(model) for model in forecast.models()],
        reduction_ns_per_byte=forecast.reduction_ns_per_byte(),
        held_out_error=held_out_error(everything),
        took_s=time.perf_counter() - begin_s,
    )
    connected.close()
    meeting.close()


def apply_event(run: Run | None, event: Event) -> Run:
    """The run, with what an event adds to it."""
    if event["event"] == "begin":
        skipped = [Skipped(**skipped) for skipped in event["skipped"]]
        return Run(event["machine"], event["versions"], event["settings"], skipped=skipped)
    if run is None:
        raise ValueError("an event with results came before the first one")
    if event["event"] == "rows":
        run.rows += [row_from_json(row) for row in event["rows"]]
        run.skipped += [Skipped(**skipped) for skipped in event["skipped"]]
        run.held_out_error = held_out_error(run.rows)
    elif event["event"] == "end":
        run.models = [model_from_json(model) for model in event["models"]]
        run.reduction_ns_per_byte = event["reduction_ns_per_byte"]
        run.finished = True
    return run


# -- ranks that we started ---------------------------------------------------------------------


def run_rank_in_folder(rank: int, size: int, folder: str, settings: BenchSettings) -> None:
    """What a rank does that the command has started: its events are lines of its stdout."""

    def write(event: Event) -> None:
        print(MARK + json.dumps(event), flush=True)

    run_rank(FolderMeeting(rank, size, folder), settings, write)


def _main(folder: str) -> None:
    """What a rank does that mpirun has started."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    settings = BenchSettings.from_dict(json.loads((Path(folder) / "settings.json").read_text()))
    try:
        run_rank_in_folder(world.rank, world.size, folder, settings)
    except BaseException as error:
        # The others would wait for this rank forever.
        if not isinstance(error, KeyboardInterrupt):
            import traceback

            traceback.print_exc()
            sys.stderr.flush()
        world.Abort(1)


if __name__ == "__main__":
    _main(sys.argv[1])
