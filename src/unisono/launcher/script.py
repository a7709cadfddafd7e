"""What `unisono run` does: start a program on several ranks, as torchrun would on one machine."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from unisono.errors import RanksFailed, RanksTimedOut
from unisono.launcher import share
from unisono.launcher.crew import Crew
from unisono.launcher.interrupts import Interrupts
from unisono.launcher.output import Callback, Listener, Terminal
from unisono.launcher.process import check_not_nested, ranks_here
from unisono.launcher.protocol import Instructions, standard_input
from unisono.launcher.record_keeper import RecordKeeper
from unisono.launcher.store import LazyStore
from unisono.processes import describe_exit
from unisono.variables import BACKEND, RECORD_KEEPER, REPLACE, WATCH
from unisono.watch.report import Report
from unisono.watch.settings import settings_of

_PATIENCE_S = 10.0
"""How long a rank that was told to end may take before it is killed: time for a checkpoint."""

_TIMED_OUT_CODE = 124
"""As of timeout(1)."""


def run_script(
    program: str,
    args: Sequence[str],
    *,
    is_module: bool,
    ranks: int,
    backend: str | None,
    replace: str | None,
    threads: int | None,
    pin: bool,
    timeout_s: float | None,
    prefix: bool,
    capture: bool,
    watch: bool,
    watch_grace_s: float,
    trace: Path | None,
) -> int:
    """Run `program` with `args` on `ranks` ranks until all have ended, as the options of `unisono
    run` say, and tell on stderr what went wrong: the exit code.

    It is that of the first rank to fail, 128 + its number for a signal, 124 for a timeout. SIGINT,
    SIGTERM and SIGHUP are passed on to the ranks.
    """
    check_not_nested()
    share.check_room(ranks)
    listener: Listener = Callback() if capture else Terminal(prefix)
    failed: RanksFailed | None = None
    report, exit_code = None, 0
    with ExitStack() as stack:
        instructions = Instructions(
            sys_path=tuple(sys.path if sys.flags.safe_path else sys.path[1:]),
            argv=("", *args),
            program=program,
            is_module=is_module,
            pins=share.pins(ranks) if pin else (),
            input_fd=stack.enter_context(standard_input()),
        )
        store = stack.enter_context(closing(LazyStore()))
        variables = store.variables() | share.thread_variables(ranks, threads, os.environ)
        if backend is not None:
            variables[BACKEND.name] = backend
        if replace is not None:
            variables[REPLACE.name] = replace
        if watch or trace is not None:
            variables["UNISONO_WATCH"] = "1"
        if trace is not None:
            variables["UNISONO_SITES"] = "1"
        interrupts = stack.enter_context(Interrupts([signal.SIGINT, signal.SIGTERM, signal.SIGHUP]))
        crew = Crew(listener, interrupts, values=False, captured=capture)
        store.listen(crew.selector)
        record_keeper, inherited = None, []
        if watch or trace is not None or WATCH.read():  # it ends after the ranks
            settings_of()  # so that a wrong variable is one error, before any rank
            record_keeper = stack.enter_context(RecordKeeper(trace, watch_grace_s, crew.give_up))
            variables[RECORD_KEEPER.name] = str(record_keeper.ranks_fd)
            inherited.append(record_keeper.ranks_fd)
        processes = stack.enter_context(
            ranks_here(instructions, ranks, variables, inherited=inherited)
        )
        stack.enter_context(crew)
        crew.add(processes)
        try:
            crew.run(timeout_s, _PATIENCE_S, time.monotonic())
        except KeyboardInterrupt:
            exit_code = 128 + interrupts.noted[0]
        except RanksTimedOut as error:
            failed, exit_code = error, _TIMED_OUT_CODE
        except RanksFailed as error:
            failed, exit_code = error, 1
            if any(rank.failed_at is not None for rank in crew.ranks):  # else they were given up
                exit_code = error.endings[error.first].exit_code or 1
                report = _what_records_say(record_keeper, crew) if record_keeper else None
    if report is not None:
        print(f"\nunisono.watch: {report}", file=sys.stderr)
    if failed is not None:
        print(f"\nunisono run: {failed}", file=sys.stderr)
    return exit_code


def _what_records_say(record_keeper: RecordKeeper, crew: Crew) -> Report | None:
    """The verdict on ranks that have failed, unless one of them has spoken."""
    if any("unisono.watch: " in rank.lines["stderr"].tail for rank in crew.ranks):
        return None
    endings = {
        rank.process.group: describe_exit(rank.exit_code)
        for rank in crew.ranks
        if rank.exit_code and rank.process.group is not None
    }
    return record_keeper.verdict(endings)
