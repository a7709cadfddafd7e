"""`unisono run`: start a program on several ranks, as torchrun would on one machine."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from unisono.errors import Misuse, RanksFailed, RanksTimedOut, TorchMissing
from unisono.launcher import share
from unisono.launcher.crew import Crew
from unisono.launcher.final_report import main_report, write_final_report
from unisono.launcher.interrupts import Interrupts
from unisono.launcher.output import Callback, Listener, Terminal, is_terminal, open_logs
from unisono.launcher.process import check_not_nested, ranks_here
from unisono.launcher.protocol import Instructions, above_the_streams
from unisono.launcher.record_keeper import RecordKeeper
from unisono.launcher.store import LazyStore
from unisono.output_files import open_at_once, temporary_folder
from unisono.processes import describe_exit
from unisono.torch_backend.autoload import backend_problem
from unisono.variables import (
    BACKEND,
    PROFILE,
    RECORD_KEEPER,
    REPLACE,
    SANITIZE,
    SITES,
    TERMINAL,
    WATCH,
    WATCH_FOLDER,
)
from unisono.watch.profiles import ProfileTrace
from unisono.watch.report import Report
from unisono.watch.settings import settings_of
from unisono.watch.traces import Trace

_PATIENCE_S = 10.0
"""How long a rank may take to end after SIGTERM before it is killed: time for a checkpoint."""

_TIMED_OUT_CODE = 124
"""The exit code of timeout(1)."""

_OF_TORCHRUN = (
    *("--standalone", "--nnodes", "--node-rank", "--rdzv-", "--master-", "--local-", "--max-"),
    *("--monitor-", "--log", "--redirects", "--tee", "--numa-", "--no-python", "--run-path"),
)
"""Prefixes of options that only torchrun has."""


class _Seconds(click.FloatRange):
    """NaN, which no comparison refuses, is no time."""

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        seconds = float(super().convert(value, param, ctx))
        if math.isnan(seconds):
            self.fail(f"{value!r} is not a time.", param, ctx)
        return seconds


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "-n",
    "--ranks",
    "--nproc-per-node",
    "--nproc_per_node",
    "-np",
    "ranks",
    metavar="COUNT",
    help="How many processes to start; auto: one per core.",
)
@click.option("-m", "--module", is_flag=True, help="PROGRAM is a module, as for python -m.")
@click.option(
    "--backend", metavar="NAME", help="The default for init_process_group() without a backend."
)
@click.option(
    "--replace",
    type=click.Choice(["gloo"]),
    help="Use unisono where the program asks torch for gloo by name (UNISONO_REPLACE).",
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    help="Threads per rank (OMP_NUM_THREADS).  [default: the cores divided by the ranks]",
)
@click.option("--pin", is_flag=True, help="Bind each rank to its share of the cores.")
@click.option(
    "--timeout",
    "timeout_s",
    metavar="SECONDS",
    type=_Seconds(min=0, min_open=True),
    help="End everything after this time, and show where each rank was.",
)
@click.option("--no-prefix", is_flag=True, help="Do not put [rank 0] before each line.")
@click.option(
    "--capture", is_flag=True, help="Show the ranks' output only if they fail, and only its end."
)
@click.option(
    "--log-dir",
    "--log_dir",
    metavar="DIR",
    type=click.Path(file_okay=False),
    help="Also write what each rank writes to DIR/RANK/stdout.log and stderr.log.",
)
@click.option("--watch", is_flag=True, help="Report hangs, after 30 s, and more (UNISONO_WATCH=1).")
@click.option(
    "--watch-grace",
    "watch_grace_s",
    metavar="SECONDS",
    type=_Seconds(min=0),
    default=10.0,
    show_default=True,
    help="With --watch: end all ranks this long after a report of something that cannot resolve; "
    "inf: never.",
)
@click.option(
    "--sanitize",
    is_flag=True,
    help="Find what makes numbers wrong: replicas that differ, races (UNISONO_SANITIZE=1). Implies "
    "--watch; exit status 3 if there is a proof.",
)
@click.option(
    "--trace",
    metavar="FILE",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write a trace of all calls, for chrome://tracing and ui.perfetto.dev. Implies --watch.",
)
@click.option(
    "--profile",
    is_flag=True,
    help="Say where the time of each step goes: computation, communication hidden and exposed, "
    "waits for slow ranks (UNISONO_PROFILE=1). Implies --watch.",
)
@click.option(
    "--profile-file",
    metavar="FILE",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Also write it to FILE: .json, .html, or text. Implies --profile.",
)
@click.argument("program")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(**given: Any) -> None:
    """Start PROGRAM on several ranks of this machine.

    \b
      unisono run -n 4 train.py --lr 0.1       four ranks of train.py
      unisono run -n 2 -m package.train        a module
      unisono run -n 4 --backend gloo train.py
      unisono run --nproc-per-node 4 --replace gloo train.py   as written for torchrun and gloo

    In the program, unisono.init() joins the ranks, and so does torch.distributed's
    init_process_group(): RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and the other
    variables are set as torchrun sets them. You do not need to choose a port, and several jobs can
    run at once.

    Every line of output is prefixed with the rank's name. If a rank fails, the others are ended. A
    terminal then shows the cause, and the path of a file with each traceback; anything else gets
    both. The exit code is that of the first rank to fail (128 + N for signal N), 124 after a
    timeout.

    For several machines use torchrun; unisono works in its programs, too.
    """
    wanted = _Wanted(**given)
    wanted.check()
    count = _count_ranks(wanted.ranks)
    variables = wanted.variables()
    check_not_nested()
    try:
        share.check_room(count)
    except FileNotFoundError as error:  # no /proc
        raise click.ClickException(str(error)) from error
    variables |= share.thread_variables(count, wanted.threads, os.environ)
    variables |= share.memory_variables(os.environ)
    with ExitStack() as stack:
        logs = open_logs(wanted.log_dir, count, stack)
        instructions = Instructions(
            sys_path=tuple(sys.path if sys.flags.safe_path else sys.path[1:]),
            argv=("", *wanted.args),
            program=wanted.program,
            is_module=wanted.module,
            pins=share.pins(count) if wanted.pin else (),
        )
        stack.enter_context(above_the_streams())
        store = stack.enter_context(closing(LazyStore()))
        interrupts = stack.enter_context(Interrupts([signal.SIGINT, signal.SIGTERM, signal.SIGHUP]))
        listener: Listener = Callback() if wanted.capture else Terminal(not wanted.no_prefix)
        crew = Crew(listener, interrupts, values=False, captured=wanted.capture, logs=logs)
        store.listen(crew.selector)
        keeper, inherited = None, []
        is_short = is_terminal(sys.stderr) and not wanted.capture
        is_watched = WATCH.read(os.environ | variables) or SANITIZE.read(os.environ)
        folder = settings_of(forgiving=not is_watched).folder  # one error, before any rank starts
        own_folder = "" if folder else stack.enter_context(_own_folder())
        folder = folder or own_folder
        if is_watched:  # the keeper ends after the ranks
            variables |= {WATCH_FOLDER.name: folder, TERMINAL.name: str(int(is_short))}
            notes: dict[int, int] = {}
            how = wanted.traces(notes), notes, wanted.watch_grace_s, crew.give_up
            keeper = RecordKeeper(*how)
            stack.enter_context(keeper)
            variables[RECORD_KEEPER.name] = str(keeper.ranks_fd)
            inherited.append(keeper.ranks_fd)
        variables = store.variables() | variables
        here = ranks_here(instructions, count, variables, inherited=inherited)
        processes = stack.enter_context(here)
        stack.enter_context(crew)
        crew.add(processes)
        exit_code, text, begun_s = 0, "", time.time()
        try:
            crew.run(wanted.timeout_s, _PATIENCE_S, time.monotonic())
        except KeyboardInterrupt:
            exit_code = 128 + interrupts.noted[0]
        except RanksFailed as error:
            exit_code = _exit_code(error, crew)
            report = _what_is_known(keeper, crew, main_report(folder, begun_s, crew.ranks))
            text = write_final_report(error, crew.ranks, report, folder, is_short)
        if exit_code == 0 and own_folder:
            shutil.rmtree(own_folder, ignore_errors=True)
    if text:
        print(f"\n{text}", file=sys.stderr)
    raise SystemExit(exit_code)


@dataclass(frozen=True)
class _Wanted:
    """The options and arguments of one `unisono run`, as given."""

    ranks: str | None
    module: bool
    backend: str | None
    replace: str | None
    threads: int | None
    pin: bool
    timeout_s: float | None
    no_prefix: bool
    capture: bool
    log_dir: str | None
    watch: bool
    watch_grace_s: float
    sanitize: bool
    trace: Path | None
    profile: bool
    profile_file: Path | None
    program: str
    args: tuple[str, ...]

    def check(self) -> None:
        """Raise Misuse for what cannot work, before anything is started."""
        if self.program.startswith("-"):  # an option unknown to click
            raise Misuse(_what_instead(self.program))
        if self.replace is not None and self.replace == (self.backend or "").lower():
            raise Misuse(f"--backend {self.backend} cannot be used with --replace {self.replace}")
        if not self.module and not Path(self.program).is_file():
            there = "is not a file" if Path(self.program).exists() else "does not exist"
            raise Misuse(f"{self.program} {there}")
        if self.log_dir == "":  # a variable of a script that is not set: not the current folder
            raise Misuse("--log-dir is empty: name a folder, or leave it out")
        for path in filter(None, (self.trace, self.profile_file)):
            check_writable(path)

    def variables(self) -> dict[str, str]:
        """What the options say to the ranks by variables. Raises Misuse for an unknown backend."""
        is_profiled = self.profile or self.profile_file is not None
        is_traced = self.trace is not None or is_profiled
        wanted = {
            BACKEND.name: None if self.backend is None else _known_backend(self.backend),
            REPLACE.name: self.replace,
            WATCH.name: "1" if self.watch or self.sanitize or is_traced else None,
            SANITIZE.name: "1" if self.sanitize else None,
            SITES.name: "1" if is_traced else None,
            PROFILE.name: "1" if is_profiled else None,
        }
        return {name: text for name, text in wanted.items() if text is not None}

    def traces(self, notes: Mapping[int, int]) -> list[Trace]:
        """What the launcher writes when the ranks have ended, from their records and `notes`."""
        found = [] if self.trace is None else [Trace(self.trace, from_the_start=True)]
        if self.profile or self.profile_file is not None:
            found.append(ProfileTrace(self.profile_file, notes, from_the_start=True))
        return found


def _exit_code(error: RanksFailed, crew: Crew) -> int:
    have_failed = any(rank.failed_at is not None for rank in crew.ranks)
    given = error.endings[error.first].exit_code if have_failed else 0
    return _TIMED_OUT_CODE if isinstance(error, RanksTimedOut) else given or 1


def _what_is_known(keeper: RecordKeeper | None, crew: Crew, saved: Report | None) -> Report | None:
    """The report for which ranks were given up, else the one that they `saved`, else what the
    records say of how they ended."""
    if keeper is None or all(rank.failed_at is None for rank in crew.ranks):
        return (keeper.report if keeper else None) or saved
    endings = {
        rank.process.group: describe_exit(rank.exit_code)
        for rank in crew.ranks
        if rank.exit_code and rank.process.group is not None
    }
    return saved or keeper.verdict(endings)


@contextlib.contextmanager
def _own_folder() -> Iterator[str]:
    """A new folder for reports, which is removed if it stays empty; "" if none can be made."""
    folder = ""
    with contextlib.suppress(OSError):
        folder = tempfile.mkdtemp(prefix="unisono-reports-", dir=temporary_folder())
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):
            os.rmdir(folder)


def check_writable(path: Path) -> None:
    """Check that the output file can be written, before the run starts.

    Raises Misuse.
    """
    if path.is_dir():
        raise Misuse(f"{path} is a folder, not a file")
    if not path.resolve().parent.is_dir():
        raise Misuse(f"the folder of {path} does not exist")
    existed = path.exists()
    try:
        descriptor = open_at_once(str(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except OSError as error:
        raise Misuse(f"{path} cannot be written: {error.strerror}") from error
    if not path.is_fifo():  # whose reader would take this for the end of the output
        os.close(descriptor)
    if not existed:
        path.unlink()


def _count_ranks(text: str | None) -> int:
    """The number of ranks; torchrun also takes words for it."""
    if text is None:
        raise Misuse("the number of ranks is missing: -n 4 starts four")
    if text in ("auto", "cpu"):
        return share.core_count()
    if not text.isdecimal() or int(text) < 1:
        raise Misuse(f"-n must be a positive number of ranks, or auto, not {text!r}")
    return int(text)


def _known_backend(name: str) -> str:
    try:
        problem = backend_problem(name.lower())
    except TorchMissing as error:
        raise Misuse(str(error)) from error
    if problem:
        raise Misuse(problem)
    return name.lower()


def _what_instead(option: str) -> str:
    """The message for an unknown option."""
    if option.replace("_", "-").startswith(_OF_TORCHRUN):
        return (
            f"{option}: unisono run does not have this option of torchrun's: it starts ranks on "
            "this machine only, needs no address and restarts no rank. Leave the option out, or "
            "use torchrun: unisono works there, too"
        )
    return f"{option}: unknown option; options of PROGRAM go after it"
