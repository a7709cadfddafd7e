"""The processes of a launch, from the first start to the last end."""

from __future__ import annotations

import pickle
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import IO

from unisono.launcher import outcomes
from unisono.launcher.guardian import Guardian
from unisono.launcher.interrupts import Interrupts
from unisono.launcher.outcomes import Rank
from unisono.launcher.output import STREAMS, Lines, Listener, Stream
from unisono.launcher.process import RankProcess
from unisono.launcher.protocol import FAILED, FINISHED, STARTED, VALUE, unpack

SURVIVORS_S = 5.0
"""How long ranks may run after one has failed: time to notice and clean up."""

LINGERING_S = 10.0
"""How long a rank may stay after it has returned its value."""

_STACKS_S = 1.0
_SILENCE_S = 0.1
_KILLED_S = 10.0
_TICK_S = 0.05
_KEPT_CHARACTERS = 1 << 16
_CAPTURED_CHARACTERS = 8 << 20


class Crew:
    """Listens to ranks and makes sure that all of them end.

    With `values` a rank must send a value before it ends; with `captured` only exceptions show the
    ranks' output. `logs` has each rank's log files, if any.
    """

    def __init__(
        self,
        listener: Listener,
        interrupts: Interrupts,
        *,
        values: bool,
        captured: bool,
        logs: Sequence[Mapping[Stream, IO[bytes]]] = (),
    ) -> None:
        self.ranks: list[Rank] = []
        self.selector = selectors.DefaultSelector()
        """For other file descriptors: register each with a function to call."""
        self._listener = listener
        self._interrupts = interrupts
        self._values = values
        self._captured = captured
        self._logs = logs
        self._guardian: Guardian | None = None
        self._given_up: tuple[str, int] | None = None
        self.selector.register(interrupts, selectors.EVENT_READ, interrupts.read)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        """Leaves no process behind, whatever has happened."""
        for rank in self._living():
            rank.process.send_signal(signal.SIGKILL)
        for rank in self._living():
            rank.process.forget()
        self.selector.close()
        if self._guardian is not None:
            self._guardian.close()

    def add(self, processes: Iterable[RankProcess]) -> None:
        """Add these ranks, in rank order; an interrupt stops further starts."""
        for process in processes:
            self._add(process)
            if self._interrupts.noted:
                break

    def _add(self, process: RankProcess) -> None:
        number = len(self.ranks)
        keep = _CAPTURED_CHARACTERS if self._captured else _KEPT_CHARACTERS
        logs = self._logs[number] if self._logs else {}
        lines = {
            stream: Lines(number, stream, self._listener, keep, logs.get(stream))
            for stream in STREAMS
        }
        rank = Rank(number, process, lines)
        self.ranks.append(rank)
        takers = (
            lines["stdout"].feed,
            lines["stderr"].feed,
            partial(self._receive, rank),
            rank.stack.extend,
        )
        process.listen(self.selector, takers, partial(self._note_end, rank))

    def run(self, timeout_s: float | None, patience_s: float, begun: float) -> None:
        """Wait until all ranks have ended, and end them if necessary, for example `timeout_s` after
        `begun`.

        `patience_s` is how long a rank may take to end before it is killed.

        Raises RanksFailed if a rank fails or the ranks are given up, RanksTimedOut if they do not
        finish in time, KeyboardInterrupt after a signal.
        """
        self._guard()  # after the ranks, to not delay their start
        left_s = None if timeout_s is None else begun + timeout_s - time.monotonic()
        self._wait(self._is_decided, left_s)
        returned = self._all_returned()
        if returned or self._any_failed():
            self._wait(self._all_ended, SURVIVORS_S if self._any_failed() else LINGERING_S)
        failed = self._any_failed()
        if self._interrupts.noted:
            self._end(self._interrupts.noted[0], patience_s)
            raise KeyboardInterrupt
        if not self._all_ended():
            if failed or not returned:
                self._ask_for_stacks()
            self._end(signal.SIGTERM, patience_s)
        if failed:
            raise outcomes.ranks_failed(self.ranks, self._captured)
        if not returned and self._given_up is not None:
            raise outcomes.ranks_given_up(self.ranks, *self._given_up, self._captured)
        if not returned:
            assert timeout_s is not None
            raise outcomes.ranks_timed_out(self.ranks, timeout_s, self._captured)

    def give_up(self, why: str, culprit: int) -> None:
        """Have the running ranks ended, for this reason; may be called from any thread."""
        self._given_up = why, culprit
        self._interrupts.wake()

    # -- their state ---------------------------------------------------------------

    def _living(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.exit_code is None]

    def _all_ended(self) -> bool:
        return not self._living()

    def _all_returned(self) -> bool:
        if not self._values:
            return self._all_ended()
        return all(rank.value is not None for rank in self.ranks)

    def _any_failed(self) -> bool:
        return any(rank.failed_at is not None for rank in self.ranks)

    def _is_decided(self) -> bool:
        return self._all_returned() or self._any_failed() or self._given_up is not None

    def _receive(self, rank: Rank, data: bytes) -> None:
        rank.messages += data
        while message := unpack(rank.messages):
            kind, payload = message
            if kind == STARTED:
                rank.started = True
            elif kind == FINISHED:
                rank.finished = True
            elif kind == VALUE:
                rank.value = payload
            elif kind == FAILED and not rank.ended_by_us:
                rank.failure = pickle.loads(payload)
                rank.failed_at = time.monotonic()

    def _note_end(self, rank: Rank, status: int) -> None:
        if status != 0 or rank.ended_by_us:
            rank.process.send_signal(signal.SIGKILL)  # its children; its pid is still its own
        rank.exit_code = status
        self._guard()  # before its pid can be reused
        rank.process.forget()
        for lines in rank.lines.values():
            lines.feed(b"", last=True)
        if rank.failure is not None:
            rank.lines["stderr"].log(rank.failure.traceback.encode(errors="replace"))
        missing = self._values and rank.value is None
        if rank.failed_at is None and not rank.ended_by_us and (status != 0 or missing):
            rank.failed_at = time.monotonic()

    def _guard(self) -> None:
        """Tell the guardian the process groups that are alive on this machine."""
        groups = [rank.process.group for rank in self._living()]
        if self._guardian is None and any(groups):
            self._guardian = Guardian()
        if self._guardian is not None:
            self._guardian.guard([group for group in groups if group is not None])

    # -- ending them ---------------------------------------------------------------------------

    def _ask_for_stacks(self) -> None:
        """Have the running ranks write their stacks."""
        asked = [rank for rank in self._living() if rank.started and rank.process.ask_for_stack()]
        interrupts = len(self._interrupts.noted)
        self._wait(lambda: all(rank.stack for rank in asked), _STACKS_S, interrupts)
        self._wait(lambda: False, _SILENCE_S, interrupts)  # long ones come in pieces

    def _end(self, number: signal.Signals, patience_s: float) -> None:
        """Tell the running ranks to end, and kill them if they do not, or if the user insists."""
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
        """Serve all ranks until `condition` holds, time is up, or more `interrupts` have come."""
        end = None if limit_s is None else time.monotonic() + limit_s
        while not condition() and len(self._interrupts.noted) <= interrupts:
            left_s = None if end is None else end - time.monotonic()
            if left_s is not None and left_s <= 0:
                return
            self._serve(left_s)

    def _serve(self, limit_s: float | None) -> None:
        unfinished = [
            lines for rank in self.ranks for lines in rank.lines.values() if lines.unfinished
        ]
        if unfinished:
            limit_s = _TICK_S if limit_s is None else min(limit_s, _TICK_S)
        for key, _ in self.selector.select(limit_s):
            key.data()
        for lines in unfinished:
            lines.tick()
