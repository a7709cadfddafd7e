"""What a profile knows beside the records: when this rank waited, which calls it left running, when
its steps began, and how long its main thread was ready to run but had no core.

It is noted where it happens, in Python, for the main thread; until a profile starts, nothing is
replaced, so that it costs nothing. The newest notes are in an anonymous file, which other processes
read as they read records, also when this one has ended.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from unisono.comm.communicator import Communicator
from unisono.comm.engine import works
from unisono.comm.shared_memory.segment_listeners import send_notes
from unisono.watch import sight, steps
from unisono.watch.memory_files import Ring, RingLayout
from unisono.watch.replacements import Replacements

WAIT, LEFT_RUNNING, BACKWARD, STEP, CALL = 1.0, 2.0, 3.0, 4.0, 5.0
"""A wait; a call that goes on after the function that made it; a backward pass, from its first such
call to its end, where DDP waits for them in C++; a step begins; a long blocking call."""
_LAYOUT = RingLayout("unisono-waits", columns=5, kept=1 << 16)
_OFTEN_S = 200e-6
"""To ask the kernel takes two microseconds: it is asked again after this time."""
_MESSAGES = "send", "recv", "recv_anysource"
_METHODS = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "gather", "scatter"),
    *("all_to_all", "barrier", "isend", "irecv", "batch_isend_irecv"),
)
Moment = tuple[float, float]
"""Seconds of time.monotonic, and how many of them the main thread has waited for a core so far."""


class WaitNote(NamedTuple):
    """One note of a process: what it is, from when to when, and `Moment`'s second part at both."""

    kind: float
    begin_s: float
    end_s: float
    no_core_at_begin_s: float = 0.0
    no_core_at_end_s: float = 0.0


class _Notes:
    """The newest notes of this process, for all its profiles."""

    def __init__(self) -> None:
        self.ring = Ring(_LAYOUT)
        self._asked_s = self._no_core_s = 0.0
        self._kernel: int | None = None
        with contextlib.suppress(OSError):  # not every kernel counts it
            path = f"/proc/self/task/{os.getpid()}/schedstat"  # of the main thread
            self._kernel = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        self.ring.close()
        if self._kernel is not None:
            os.close(self._kernel)

    def now(self) -> Moment:
        now_s = time.monotonic()
        if now_s - self._asked_s > _OFTEN_S and self._kernel is not None:
            self._asked_s = now_s
            self._no_core_s = int(os.pread(self._kernel, 64, 0).split()[1]) / 1e9
        return now_s, self._no_core_s

    def add(self, kind: float, begin: Moment) -> None:
        """Note what ends now; a call that was blocking and short is only in the records."""
        end_s, no_core_s = self.now()
        if kind != CALL or end_s - begin[0] >= _OFTEN_S:
            self.ring.add(kind, begin[0], end_s, begin[1], no_core_s)


_of_process: dict[int, _Notes] = {}
"""The notes of this process, by its PID."""


class WaitNotes:
    """The notes of this process, while it is profiled, for a number of `users`."""

    def __init__(self) -> None:
        if os.getpid() not in _of_process:
            while _of_process:  # a forked child's are its parent's
                _of_process.popitem()[1].close()
            _of_process[os.getpid()] = _Notes()
        self._notes = _of_process[os.getpid()]
        self._main = threading.main_thread().ident
        self.users = 0
        self._replacements = Replacements()
        self._replace = self._replacements.replace
        self._kinds: set[type] = set()
        self._is_inside = False  # the main thread, a call or a wait: what that calls is not noted
        self._pass = -1
        steps.on_step = self._step
        for name in _METHODS:
            self._replace(Communicator, name, self._leaving)
        for kind in works:
            self._replace(kind, "wait", self._waiting)
        if "torch" in sys.modules:
            self.watch_torch()
        send_notes(self._notes.ring.file)

    def watch_torch(self) -> None:
        """Note what torch's groups do as well."""
        import torch
        import torch.distributed as dist

        from unisono.comm.on_rows.thread_executor import ThreadWork
        from unisono.watch.torch_group import WatchedProcessGroup

        for kind in (dist.Work, torch.Future, ThreadWork):
            self._replace(kind, "wait", self._waiting)
        for group in dist.distributed_c10d._world.pg_map:
            self.follow(group)
        WatchedProcessGroup.notes_ends = True
        for group in list(sight.watched_groups):
            group.choose_path()

    def follow(self, group: Any) -> None:
        """Note the calls of a group of torch's, and of all others of its kind, if that is a class
        in Python."""
        from unisono.watch.torch_group import COLLECTIVES

        kind = type(group)
        if kind not in self._kinds:
            self._kinds.add(kind)
            for name in (*COLLECTIVES, *_MESSAGES):
                if hasattr(getattr(kind, name, None), "__code__"):
                    self._replace(kind, name, self._leaving_in_backward)

    def close(self) -> None:
        """Replace nothing any more. The notes stay for other ranks to read."""
        steps.on_step = None
        self._replacements.undo()
        watched = sys.modules.get("unisono.watch.torch_group")
        if watched is not None:
            watched.WatchedProcessGroup.notes_ends = False
            for group in list(sight.watched_groups):
                group.choose_path()

    def _step(self) -> None:
        if threading.get_ident() == self._main:
            self._notes.add(STEP, self._notes.now())

    def _waiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        return self._noting(original, lambda _: WAIT)

    def _leaving(self, original: Callable[..., Any]) -> Callable[..., Any]:
        return self._noting(original, lambda work: CALL if work is None else LEFT_RUNNING)

    def _noting(
        self, original: Callable[..., Any], kind: Callable[[Any], float]
    ) -> Callable[..., Any]:
        notes, main = self._notes, self._main

        def call(*given: Any, **named: Any) -> Any:
            if self._is_inside or threading.get_ident() != main:
                return original(*given, **named)
            self._is_inside, begin = True, notes.now()
            result = None
            try:
                result = original(*given, **named)
            finally:
                self._is_inside = False
                notes.add(kind(result), begin)
            return result

        return call

    def _leaving_in_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        import torch

        call = self._leaving(original)
        engine = torch.autograd.Variable._execution_engine

        def method(*given: Any, **named: Any) -> Any:
            number = torch._C._current_graph_task_id()
            if number not in (-1, self._pass) and torch._C._current_autograd_node() is not None:
                self._pass = number
                begin = self._notes.now()
                engine.queue_callback(functools.partial(self._notes.add, BACKWARD, begin))
            return call(*given, **named)

        return method


def notes_in(file: int) -> tuple[list[WaitNote], int]:
    """The notes in a file of theirs, in order, and how many older ones are gone."""
    rows, gone = _LAYOUT.read(file)
    return [WaitNote(*row) for row in rows], gone


def notes_of(pid: int) -> tuple[list[WaitNote], int] | None:
    """The same of a process of this host; None if it has none, or has ended."""
    rows, gone = _LAYOUT.read_process(pid) or (None, 0)
    return None if rows is None else ([WaitNote(*row) for row in rows], gone)
