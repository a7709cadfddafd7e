"""What `unisono run` does: start a program on several ranks, as torchrun would on one machine."""

from __future__ import annotations

import os
import secrets
import signal
import sys
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from unisono.errors import RanksFailed
from unisono.launcher import share
from unisono.launcher.crew import Crew, Verdict
from unisono.launcher.functions import KEPT_CHARACTERS, check_not_nested, rank_variables
from unisono.launcher.interrupts import Interrupts
from unisono.launcher.outcomes import ranks_failed, ranks_given_up, ranks_timed_out
from unisono.launcher.output import Callback, Listener, Terminal
from unisono.launcher.process import start_process
from unisono.launcher.protocol import (
    Instructions,
    Script,
    nameless_file,
    standard_input,
    write_instructions,
)
from unisono.launcher.record_keeper import RecordKeeper
from unisono.launcher.store import LazyStore
from unisono.processes import describe_exit
from unisono.variables import BACKEND, RECORD_KEEPER, REPLACE, WATCH
from unisono.watch.report import Report
from unisono.watch.settings import settings_of

PATIENCE_S = 10.0
"""How long a rank that was told to end may take before it is killed: time for a checkpoint."""

WATCH_GRACE_S = 10.0
"""How long watched ranks go on after a report of what they cannot get out of by themselves."""

TIMED_OUT_CODE = 124
"""As of timeout(1)."""


@dataclass(frozen=True)
class RunSettings:
    """How to run a program. `replace` is a backend whose place unisono takes; `capture` keeps the
    output of ranks that do not fail to itself; `trace` is where a trace is written, for which the
    ranks must be watched; `watch_grace_s` is how long they go on after a report of a mismatch or of
    ranks that wait for each other."""

    ranks: int
    backend: str | None = None
    replace: str | None = None
    threads: int | None = None
    pin: bool = False
    timeout_s: float | None = None
    prefix: bool = True
    capture: bool = False
    watch: bool = False
    watch_grace_s: float = WATCH_GRACE_S
    trace: Path | None = None

    def is_watched(self) -> bool:
        """Whether the ranks watch themselves."""
        return self.watch or self.trace is not None or WATCH.read() or False


@dataclass(frozen=True)
class Outcome:
    """The exit code for the shell, and what went wrong, if anything has. `report` is what the
    records say, where ranks were watched and none of them has said it."""

    exit_code: int
    error: RanksFailed | None = None
    report: Report | None = None


def run_script(script: Script, settings: RunSettings) -> Outcome:
    """Run `script` on `settings.ranks` ranks until all have ended.

    The exit code is that of the first rank to fail, 128 + its number for a signal, 124 for a
    timeout. SIGINT, SIGTERM and SIGHUP are passed on to the ranks.
    """
    check_not_nested()
    share.check_room(settings.ranks)
    listener: Listener = Callback() if settings.capture else Terminal(settings.prefix)
    signals = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    with ExitStack() as stack:
        instructions = Instructions(
            script=script,
            sys_path=tuple(sys.path if sys.flags.safe_path else sys.path[1:]),
            argv=("", *script.args),
            pins=share.pins(settings.ranks) if settings.pin else (),
            input_fd=stack.enter_context(standard_input()),
        )
        file = stack.enter_context(write_instructions(instructions))
        meeting = stack.enter_context(nameless_file())
        store = stack.enter_context(closing(LazyStore()))
        interrupts = stack.enter_context(Interrupts(signals))
        environment = os.environ | _program_variables(settings, store)
        inherited = [meeting.fileno(), instructions.input_fd]
        record_keeper = None
        if settings.is_watched():  # it ends after the ranks
            settings_of()  # so that a wrong variable is one error, before any rank
            record_keeper = stack.enter_context(
                RecordKeeper(settings.trace, settings.watch_grace_s)
            )
            environment[RECORD_KEEPER.name] = str(record_keeper.ranks_fd)
            inherited.append(record_keeper.ranks_fd)
        crew = stack.enter_context(Crew(listener, interrupts, values=False, keep=KEPT_CHARACTERS))
        crew.call_when_readable(store.fileno(), store.start)
        if record_keeper is not None:
            crew.call_when_readable(record_keeper.fileno(), crew.give_up)
        for rank in range(settings.ranks):
            if interrupts.noted:
                break
            own_variables = rank_variables(rank, settings.ranks, meeting.fileno())
            own_variables["ROLE_RANK"] = str(rank)
            crew.add(start_process(rank, environment | own_variables, file.fileno(), inherited))
        verdict = crew.run(settings.timeout_s, PATIENCE_S)
        report = _what_records_say(record_keeper, crew) if record_keeper is not None else None
    if verdict is Verdict.INTERRUPTED:
        return Outcome(128 + interrupts.noted[0])
    if verdict is Verdict.FAILED:
        error = ranks_failed(crew.ranks, captured=settings.capture)
        return Outcome(error.endings[error.first].exit_code or 1, error, report)
    if verdict is Verdict.GIVEN_UP:
        assert record_keeper is not None
        found = record_keeper.reported()
        assert found is not None
        given_up = ranks_given_up(
            crew.ranks, found, settings.watch_grace_s, captured=settings.capture
        )
        return Outcome(1, given_up)
    if verdict is Verdict.TIMED_OUT:
        assert settings.timeout_s is not None
        late = ranks_timed_out(crew.ranks, settings.timeout_s, captured=settings.capture)
        return Outcome(TIMED_OUT_CODE, late)
    return Outcome(0)


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


def _program_variables(settings: RunSettings, store: LazyStore) -> dict[str, str]:
    """What torchrun sets for all ranks of a program, and our own."""
    host, port = store.address
    variables = {
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": str(settings.ranks),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # nobody but us hosts it
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": secrets.token_hex(8),
    }
    variables |= share.thread_variables(settings.ranks, settings.threads, os.environ)
    if settings.backend is not None:
        variables[BACKEND.name] = settings.backend
    if settings.replace is not None:
        variables[REPLACE.name] = settings.replace
    if settings.watch or settings.trace is not None:
        variables["UNISONO_WATCH"] = "1"
    if settings.trace is not None:
        variables["UNISONO_SITES"] = "1"
    return variables
