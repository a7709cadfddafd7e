"""Starting the ranks of a run: by `unisono.launch`, or by mpirun where MPI takes part."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from unisono.bench import meeting
from unisono.bench.session import MARK, Listener, run_rank, run_rank_in_folder
from unisono.bench.settings import BenchSettings
from unisono.environment import read_rank_info
from unisono.errors import UnisonoError
from unisono.launcher.functions import launch
from unisono.torch_support import require_torch

GRACE_S = 5.0
"""How long mpirun has to end its ranks, once asked to, before it is killed."""


def run(settings: BenchSettings, listener: Listener, others: Callable[[str], None]) -> None:
    """Measure; `listener` gets every event of the run, and `others` gets the ranks' other lines.

    Raises UnisonoError if ranks fail, and KeyboardInterrupt; events until then are right.
    """
    require_torch("unisono bench")
    if meeting.launched_rank() is None:
        start_ranks(settings, listener, others)
    else:
        with _ended_by_signals():
            run_rank(meeting.meeting_of_launched_ranks(), settings, listener)


def start_ranks(settings: BenchSettings, listener: Listener, others: Callable[[str], None]) -> None:
    """`run` on ranks of our own, which start and end here."""

    def handle_line(text: str) -> None:
        before, mark, event = text.partition(MARK)
        if mark:
            listener(json.loads(event))
        if before:
            others(before)

    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
        mpirun = find_mpirun() if "mpi" in settings.backends else None
        if mpirun is not None:
            _run_mpi(mpirun, settings, folder, handle_line)
            return
        launch(
            _rank,
            settings.ranks,
            (folder, settings),
            threads=1,
            on_line=lambda rank, stream, text: handle_line(text),
        )


def _rank(folder: str, settings: BenchSettings) -> None:
    info = read_rank_info()
    assert info is not None
    run_rank_in_folder(info.rank, info.size, folder, settings)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Whoever started this rank ends it by SIGTERM: that is then as good as a Ctrl-C."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


# -- mpirun ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mpirun:
    """The program that starts ranks, and whether it is Open MPI's."""

    path: str
    is_open_mpi: bool


def find_mpirun() -> Mpirun | None:
    """The mpirun beside this Python, or in PATH, if mpi4py is there to use it."""
    if importlib.util.find_spec("mpi4py") is None:
        return None
    beside = Path(sys.executable).parent / "mpirun"
    path = str(beside) if beside.exists() else shutil.which("mpirun")
    if path is None:
        return None
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    return Mpirun(path, "Open MPI" in said or "prte" in said.lower())


def _command(mpirun: Mpirun, ranks: int, spins: bool) -> list[str]:
    if not mpirun.is_open_mpi:
        return [mpirun.path, "-n", str(ranks)]
    return [
        mpirun.path,
        *(["--allow-run-as-root"] if os.geteuid() == 0 else []),
        # As many slots as ranks, whatever mpirun counts as a core.
        *("--host", f"localhost:{ranks}", "-n", str(ranks)),
        # Where another program takes a core for a moment, a rank that spins keeps it from its peer.
        *("--mca", "mpi_yield_when_idle", str(int(not spins))),
        # A rank bound to one core would share it with its own gloo threads, and would tell any
        # library which looks at its affinity that there is one core for all ranks.
        *("--bind-to", "none"),
    ]


def _run_mpi(
    mpirun: Mpirun, settings: BenchSettings, folder: str, handle_line: Callable[[str], None]
) -> None:
    (Path(folder) / "settings.json").write_text(json.dumps(settings.as_dict()))
    # mpirun keeps its session in TMPDIR: what a killed one leaves there goes with ours.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": folder}
    command = [
        *_command(mpirun, settings.ranks, settings.mpi_spins),
        sys.executable,
        "-m",
        "unisono.bench.session",
    ]
    with subprocess.Popen(
        [*command, folder],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                handle_line(line.rstrip("\n"))
            status = process.wait()
        finally:
            _end(process)
    if status:
        raise UnisonoError(f"mpirun ended with {status}: what the ranks said stands above")


def _end(process: subprocess.Popen[Any]) -> None:
    """The polite way, since mpirun then ends its ranks, and the hard way if it must be."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
