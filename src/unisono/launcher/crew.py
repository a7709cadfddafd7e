"""The processes of a launch, from their start to the end of the last one."""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable
from enum import Enum

from unisono.launcher.guardian import Guardian
from unisono.launcher.interrupts import Interrupts
from unisono.launcher.output import Lines, Listener, Stream
from unisono.launcher.process import Rank, RankProcess
from unisono.launcher.protocol import FAILED, STARTED, VALUE, Failure, unpack

SURVIVORS_S = 5.0
"""How long ranks may go on after one has failed: time to find out and to tidy up."""

LINGERING_S = 10.0
"""How long a rank may stay after it has returned its value."""

_STACKS_S = 1.0
_SILENCE_S = 0.1
_KILLED_S = 10.0
_TICK_S = 0.05
_PIECE_BYTES = 1 << 16
_PIPE_BYTES = 1 << 20  # as much as a pipe can hold, unless root has made it larger


class Verdict(Enum):
    """How a launch as a whole came to its end."""

    DONE = "done"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    INTERRUPTED = "interrupted"
    GIVEN_UP = "given up"


class Crew:
    """Listens to ranks and sees to it that all end when they should.

    `values` says that a rank must send a value before it ends; `keep` is how much of each stream
    is kept.
    """

    def __init__(
        self, listener: Listener, interrupts: Interrupts, *, values: bool, keep: int
    ) -> None:
        self.ranks: list[Rank] = []
        self._listener = listener
        self._interrupts = interrupts
        self._values = values
        self._keep = keep
        self._guardian: Guardian | None = None
        self._given_up = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(interrupts, selectors.EVENT_READ, interrupts.read)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        """Nobody is left, whatever has happened."""
        for rank in self._living():
            rank.process.send_signal(signal.SIGKILL)
        for rank in self._living():
            rank.process.forget()
        for rank in self.ranks:
            for descriptor in list(rank.pipes):
                self._close(rank, descriptor)
        self._selector.close()
        if self._guardian is not None:
            self._guardian.close()

    def call_when_readable(self, descriptor: int, function: Callable[[], None]) -> None:
        """Call `function` once, as soon as `descriptor` is readable."""

        def call() -> None:
            self._selector.unregister(descriptor)
            function()

        self._selector.register(descriptor, selectors.EVENT_READ, call)

    def add(self, process: RankProcess, host: str = "") -> None:
        """Look after the next rank's process, too."""
        number = len(self.ranks)
        lines: dict[Stream, Lines] = {
            "stdout": Lines(number, "stdout", self._listener, self._keep),
            "stderr": Lines(number, "stderr", self._listener, self._keep),
        }
        rank = Rank(number, process, lines, list(process.readers), host)
        self.ranks.append(rank)
        takers: tuple[Callable[[bytes], object], ...] = (
            lines["stdout"].feed,
            lines["stderr"].feed,
            lambda data: self._receive(rank, data),
            rank.stack.extend,
        )
        for descriptor, take in zip(process.readers, takers, strict=True):
            self._listen(rank, descriptor, take)
        if process.end_fd is not None:  # else the tick finds it
            self._selector.register(
                process.end_fd, selectors.EVENT_READ, lambda: self._check_ended(rank)
            )

    def run(self, timeout_s: float | None, patience_s: float) -> Verdict:
        """Wait until all ranks have ended, and end them where that must be.

        `patience_s` is how long a rank that was told to end may take before it is killed.
        """
        if self._groups():
            self._guardian = Guardian()  # after the ranks, whose start shall not wait for it
            self._guardian.guard(self._groups())
        self._wait(lambda: self._all_returned() or self._any_failed() or self._given_up, timeout_s)
        verdict = Verdict.GIVEN_UP if self._given_up else Verdict.TIMED_OUT
        if self._any_failed():
            verdict = Verdict.FAILED
            self._wait(self._all_ended, SURVIVORS_S)
        elif self._all_returned():
            self._wait(self._all_ended, LINGERING_S)
            verdict = Verdict.FAILED if self._any_failed() else Verdict.DONE
        if self._interrupts.noted:
            self._end(self._interrupts.noted[0], patience_s)
            return Verdict.INTERRUPTED
        if not self._all_ended():
            if verdict is not Verdict.DONE:
                self._ask_for_stacks()
            self._end(signal.SIGTERM, patience_s)
        return verdict

    def give_up(self) -> None:
        """Ranks that still run are to be ended."""
        self._given_up = True

    # -- what has become of them ---------------------------------------------------------------

    def _living(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.exit_code is None]

    def _groups(self) -> list[int]:
        """The process groups of this machine that live."""
        groups = [rank.process.group for rank in self._living()]
        return [group for group in groups if group is not None]

    def _all_ended(self) -> bool:
        return not self._living()

    def _all_returned(self) -> bool:
        if not self._values:
            return self._all_ended()
        return all(rank.value is not None for rank in self.ranks)

    def _any_failed(self) -> bool:
        return any(rank.failed_at is not None for rank in self.ranks)

    def _receive(self, rank: Rank, data: bytes) -> None:
        rank.messages += data
        while message := unpack(rank.messages):
            kind, payload = message
            if kind == STARTED:
                rank.started = True
            elif kind == VALUE:
                rank.value = payload
            elif kind == FAILED and not rank.ended_by_us:
                rank.failure = Failure(**json.loads(payload))
                rank.failed_at = time.monotonic()

    def _check_ended(self, rank: Rank) -> None:
        """See whether a rank has ended, and how."""
        if rank.exit_code is not None:
            return
        status = rank.process.find_status()
        if status is None:
            return
        if status != 0 or rank.ended_by_us:
            rank.process.send_signal(signal.SIGKILL)  # what it started; its number is still its own
        rank.exit_code = status
        if self._guardian is not None:  # before its number can be another's
            self._guardian.guard(self._groups())
        if rank.process.end_fd is not None:
            self._selector.unregister(rank.process.end_fd)
        rank.process.forget()
        for descriptor in list(rank.pipes):
            self._drain(rank, descriptor)
        for lines in rank.lines.values():
            lines.feed(b"", last=True)
        missing = self._values and rank.value is None
        if rank.failed_at is None and not rank.ended_by_us and (rank.exit_code != 0 or missing):
            rank.failed_at = time.monotonic()

    # -- ending them ---------------------------------------------------------------------------

    def _ask_for_stacks(self) -> None:
        """Have those who live write down where they are."""
        asked = [rank for rank in self._living() if rank.started and rank.process.ask_for_stack()]
        interrupts = len(self._interrupts.noted)
        self._wait(lambda: all(rank.stack for rank in asked), _STACKS_S, interrupts)
        self._wait(lambda: False, _SILENCE_S, interrupts)  # long ones come in pieces

    def _end(self, number: signal.Signals, patience_s: float) -> None:
        """Tell those who live to end, and kill them if they do not, or if the user insists."""
        for rank in self._living():
            rank.ended_by_us = True
            rank.process.send_signal(number if rank.started else signal.SIGKILL)
        self._wait(self._all_ended, patience_s, len(self._interrupts.noted))
        for rank in self._living():
            rank.process.send_signal(signal.SIGKILL)
        self._wait(self._all_ended, _KILLED_S, sys.maxsize)

    # -- the loop ------------------------------------------------------------------------------

    def _wait(
        self, condition: Callable[[], bool], limit_s: float | None, interrupts: int = 0
    ) -> None:
        """Serve everybody until `condition` holds, time is up, or more `interrupts` have come."""
        end = None if limit_s is None else time.monotonic() + limit_s
        while not condition() and len(self._interrupts.noted) <= interrupts:
            left_s = None if end is None else end - time.monotonic()
            if left_s is not None and left_s <= 0:
                return
            self._serve(left_s)

    def _serve(self, limit_s: float | None) -> None:
        unwatched = [rank for rank in self._living() if rank.process.end_fd is None]
        unfinished = [
            lines for rank in self.ranks for lines in rank.lines.values() if lines.unfinished
        ]
        if unwatched or unfinished:
            limit_s = _TICK_S if limit_s is None else min(limit_s, _TICK_S)
        for key, _ in self._selector.select(limit_s):
            key.data()
        for rank in unwatched:
            self._check_ended(rank)
        for lines in unfinished:
            lines.tick()

    def _listen(self, rank: Rank, descriptor: int, take: Callable[[bytes], object]) -> None:
        os.set_blocking(descriptor, False)

        def read() -> bool:
            """Whether there was something."""
            if descriptor not in rank.pipes:
                return False  # closed within this turn
            try:
                data = os.read(descriptor, _PIECE_BYTES)
            except BlockingIOError:
                return False
            if data:
                take(data)
            else:
                self._close(rank, descriptor)
            return bool(data)

        self._selector.register(descriptor, selectors.EVENT_READ, read)

    def _drain(self, rank: Rank, descriptor: int) -> None:
        """Read what a rank that has ended left behind.

        Not to the end of the file: a process that the rank left behind may hold it open.
        """
        read = self._selector.get_key(descriptor).data
        for _ in range(_PIPE_BYTES // _PIECE_BYTES + 1):
            if not read():
                break
        if descriptor in rank.pipes:
            self._close(rank, descriptor)

    def _close(self, rank: Rank, descriptor: int) -> None:
        rank.pipes.remove(descriptor)
        self._selector.unregister(descriptor)
        os.close(descriptor)
