"""What a profile knows beside the records: when this rank waited, which calls it left running, and
when its steps began.

It is noted where it happens, in Python, for the main thread; until a profile starts, nothing is
replaced, so that it costs nothing. Notes are in an anonymous file, which other processes read as
they read records, also when this one has ended.
"""

from __future__ import annotations

import contextlib
import functools
import os
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from unisono.comm.communicator import Communicator
from unisono.comm.engine import works
from unisono.comm.shared_memory.segment_listeners import send_notes
from unisono.errors import UnisonoError
from unisono.watch import sight, steps
from unisono.watch.memory_files import open_memory

WAIT, LEFT_RUNNING, BACKWARD, STEP = 1.0, 2.0, 3.0, 4.0
"""A wait; a call that goes on after the function that made it; a backward pass, from its first such
call to its end, where DDP waits for them in C++; a step begins."""
_NOTE = struct.Struct("<3d")
_NAME = "unisono-waits"
_MESSAGES = "send", "recv", "recv_anysource"
_METHODS = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "gather", "scatter"),
    *("all_to_all", "barrier", "isend", "irecv", "batch_isend_irecv"),
)

_files: dict[int, int] = {}
"""The file of this process, by its PID: for all its profiles, one after the other."""


class WaitNote(NamedTuple):
    """One note of a process: what it is, from when to when, in seconds of time.monotonic."""

    kind: float
    begin_s: float
    end_s: float


class WaitNotes:
    """The notes of this process, while it is profiled."""

    def __init__(self) -> None:
        if os.getpid() not in _files:
            while _files:  # a forked child's are its parent's
                os.close(_files.popitem()[1])
            _files[os.getpid()] = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        self._file = _files[os.getpid()]
        self._main = threading.main_thread().ident
        self._replaced: list[tuple[Any, str, Any]] = []
        self._kinds: set[type] = set()
        self._is_waiting = False
        self._pass = -1
        steps.on_step = lambda: self._note(STEP, time.monotonic())
        for name in _METHODS:
            self._replace(Communicator, name, self._leaving)
        for kind in works:
            self._replace(kind, "wait", self._waiting)
        if "torch" in sys.modules:
            self.watch_torch()
        send_notes(self._file)

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
        for owner, name, original in reversed(self._replaced):
            setattr(owner, name, original)
        self._replaced.clear()
        watched = sys.modules.get("unisono.watch.torch_group")
        if watched is not None:
            watched.WatchedProcessGroup.notes_ends = False
            for group in list(sight.watched_groups):
                group.choose_path()

    def _replace(self, owner: Any, name: str, how: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        self._replaced.append((owner, name, original))
        setattr(owner, name, functools.wraps(original)(how(original)))

    def _note(self, kind: float, begin_s: float) -> None:
        os.write(self._file, _NOTE.pack(kind, begin_s, time.monotonic()))

    def _waiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*given: Any, **named: Any) -> Any:
            if self._is_waiting or threading.get_ident() != self._main:
                return original(*given, **named)
            self._is_waiting, begin_s = True, time.monotonic()
            try:
                return original(*given, **named)
            finally:
                self._is_waiting = False
                self._note(WAIT, begin_s)

        return wait

    def _leaving(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            begin_s = time.monotonic()
            work = original(*given, **named)
            if work is not None:
                self._note(LEFT_RUNNING, begin_s)
            return work

        return call

    def _leaving_in_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        import torch

        call = self._leaving(original)
        engine = torch.autograd.Variable._execution_engine

        def method(*given: Any, **named: Any) -> Any:
            number = torch._C._current_graph_task_id()
            if number not in (-1, self._pass) and torch._C._current_autograd_node() is not None:
                self._pass = number
                engine.queue_callback(functools.partial(self._note, BACKWARD, time.monotonic()))
            return call(*given, **named)

        return method


def notes_in(file: int) -> list[WaitNote]:
    """The notes in a file of theirs."""
    size = os.fstat(file).st_size // _NOTE.size * _NOTE.size
    return [WaitNote(*note) for note in _NOTE.iter_unpack(os.pread(file, size, 0))]


def notes_of(pid: int) -> list[WaitNote] | None:
    """The notes of a process of this host; None if it has none, or has ended."""
    with contextlib.suppress(OSError, UnisonoError), open_memory(pid, _NAME) as file:
        return notes_in(file)
    return None
