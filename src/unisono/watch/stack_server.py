"""The stack server: a process answers other processes of its user that ask for its stacks.

It uses an anonymous file that processes of the same user find through /proc. The asking process
writes a number into it; the watching thread writes its stacks and then the same number. If the
process cannot run Python (a thread keeps the GIL), its busy threads are sent the reserved signal,
one after the other, and faulthandler writes the stack of each into a second file. A thread writes
only its own: to read the stack of a thread that runs can crash the process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import json
import logging
import mmap
import os
import signal
import struct
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict

from unisono.errors import UnisonoError
from unisono.processes import (
    busy_threads,
    handles_signal,
    signal_thread,
    state_of,
)
from unisono.watch.garbage import Collections
from unisono.watch.memory_files import open_memory
from unisono.watch.report import build
from unisono.watch.stacks import (
    Stack,
    ended_threads,
    failed_tasks,
    from_faulthandler,
    note_ended_thread,
    note_failed_tasks,
    own_stacks,
)
from unisono.watch.store_calls import follow_store

SIGNAL = signal.SIGRTMIN + 8 if hasattr(signal, "SIGRTMIN") else 0
PATIENCE_S = 1.5
"""How long a process may take to answer before it is sent the signal."""

_MAGIC = 0x326B736564756E75
_HEAD = struct.Struct("<QiI")  # magic, pid, signal
_INTEGER = struct.Struct("<Q")
_ANSWER = struct.Struct("<Qd")  # the question that was answered, and when
_ASKED, _ANSWERED, _TEXT, _BYTES = 16, 24, 40, 1 << 18
_FRESH_S = 0.5  # an answer this recent is used again
_SIGNAL_S = 1.0
_LOOK_S = 0.02
_logger = logging.getLogger("unisono")
_MOST_THREADS = 4
_own: list[StackServer] = []
"""The one of this process, which answers while it waits for others' answers."""
_childs_files: list[int] = []
"""In a forked child: where it writes its stacks."""


class StackServer:
    """This process's own."""

    def __init__(self) -> None:
        self._file = os.memfd_create("unisono-stack-server", os.MFD_CLOEXEC)
        self._stacks = os.memfd_create("unisono-stacks", os.MFD_CLOEXEC)
        self._signal = _reserve(SIGNAL, self._stacks)
        self._usual_hook = threading.excepthook
        threading.excepthook = self._note_ended_thread
        self._stop_noting_tasks = note_failed_tasks()
        self._collections = Collections()
        self._stop_following_store = follow_store()
        ended_threads.clear()
        failed_tasks.clear()
        while _childs_files:  # to tell it from our parent's server
            os.close(_childs_files.pop())
        os.ftruncate(self._file, _BYTES)
        self._memory = mmap.mmap(self._file, _BYTES)
        _HEAD.pack_into(self._memory, 0, _MAGIC, os.getpid(), self._signal)
        _own[:] = [self]

    def answer_if_asked(self) -> None:
        """Write our stacks if a process has asked for them."""
        (asked,) = _INTEGER.unpack_from(self._memory, _ASKED)
        if asked == _ANSWER.unpack_from(self._memory, _ANSWERED)[0]:
            return
        text = json.dumps([asdict(stack) for stack in own_stacks()]).encode()
        if len(text) > _BYTES - _TEXT - 8:
            text = json.dumps([asdict(stack) for stack in own_stacks()[:1]]).encode()
        _INTEGER.pack_into(self._memory, _TEXT, 0)  # so that no reader sees a part of it
        self._memory[_TEXT + 8 : _TEXT + 8 + len(text)] = text
        _INTEGER.pack_into(self._memory, _TEXT, len(text))
        _ANSWER.pack_into(self._memory, _ANSWERED, asked, time.monotonic())

    def close(self) -> None:
        """Stop answering."""
        _own.clear()
        if self._signal and signal.getsignal(self._signal) is signal.SIG_DFL:
            faulthandler.unregister(self._signal)  # otherwise the program uses it now
        if threading.excepthook == self._note_ended_thread:
            threading.excepthook = self._usual_hook
        self._stop_noting_tasks()
        self._collections.close()
        self._stop_following_store()
        self._memory.close()
        os.close(self._file)
        os.close(self._stacks)

    def leave_to_parent(self) -> None:
        """In a forked child: do not answer, but write stacks on the signal, for questions to the
        parent."""
        self.close()
        if self._signal:
            _childs_files.append(os.memfd_create("unisono-stacks", os.MFD_CLOEXEC))
            _reserve(self._signal, _childs_files[-1])

    def _note_ended_thread(self, args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
            note_ended_thread(args.thread, args.exc_value)
        self._usual_hook(args)


def _reserve(number: int, descriptor: int) -> int:
    """Register faulthandler for a signal, unless the program uses it: then returns 0."""
    if not number:
        return 0
    if signal.getsignal(number) is not signal.SIG_DFL:
        _logger.warning(
            "unisono.watch: the program handles signal %d itself, so this process cannot write "
            "its stack while it holds the GIL",
            number,
        )
        return 0
    faulthandler.register(number, descriptor, all_threads=False)
    return number


def answer_if_asked() -> None:
    """Answer, if this process has a server."""
    for server in _own[:]:
        server.answer_if_asked()


def request_stacks(pids: Iterable[int]) -> None:
    """Ask several processes at once, so that `ask` finds answers."""
    for pid in set(pids) - {os.getpid()}:
        with (
            contextlib.suppress(OSError, ValueError, UnisonoError),
            open_memory(pid, "unisono-stack-server") as file,
            mmap.mmap(file, _BYTES) as memory,
        ):
            _post(memory)


def ask(pid: int) -> list[Stack]:
    """The stacks of a process, the main thread's first; none if it does not answer."""
    if pid == os.getpid():
        return own_stacks()
    try:
        with open_memory(pid, "unisono-stack-server") as file, mmap.mmap(file, _BYTES) as memory:
            return _ask_server(pid, memory)
    except (OSError, ValueError, UnisonoError):
        return []


def _ask_server(pid: int, memory: mmap.mmap) -> list[Stack]:
    magic, owner, number = _HEAD.unpack_from(memory, 0)
    if magic != _MAGIC or owner != pid or state_of(pid).is_stopped:
        return []  # a forked child has its parent's server
    asked = _post(memory)
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        if _INTEGER.unpack_from(memory, _ANSWERED)[0] >= asked:
            (length,) = _INTEGER.unpack_from(memory, _TEXT)
            with contextlib.suppress(ValueError):  # it is answering another process
                found = json.loads(memory[_TEXT + 8 : _TEXT + 8 + length])
                return [build(Stack, stack) for stack in found]
        _pause()
    return _ask_by_signal(pid, number) if number else []


def _post(memory: mmap.mmap) -> int:
    """Ask, unless another process just has; returns the number of the question."""
    (asked,) = _INTEGER.unpack_from(memory, _ASKED)
    answered, at_s = _ANSWER.unpack_from(memory, _ANSWERED)
    if asked == answered and time.monotonic() - at_s > _FRESH_S:
        asked += 1
        _INTEGER.pack_into(memory, _ASKED, asked)
    return int(asked)


def _ask_by_signal(pid: int, number: int) -> list[Stack]:
    found: list[Stack] = []
    with open_memory(pid, "unisono-stacks") as file:
        while not _is_locked(file):  # another process asks
            _pause()
        for thread in busy_threads(pid, number)[:_MOST_THREADS]:
            if not handles_signal(pid, number):  # a library took the handler: it would kill
                break
            before = os.fstat(file).st_size
            signal_thread(pid, thread, number)
            end, sizes = time.monotonic() + _SIGNAL_S, [before]
            while time.monotonic() < end and not before < sizes[-1] == sizes[-2]:
                _pause()
                sizes.append(os.fstat(file).st_size)
            text = os.pread(file, sizes[-1] - before, before).decode(errors="replace")
            if frames := from_faulthandler(text):
                found.append(Stack("MainThread" if thread == pid else f"thread {thread}", frames))
    return found


def ask_child(pid: int, child: int) -> list[Stack]:
    """The stacks of a forked child of a watched process. Raises OSError or UnisonoError."""
    with open_memory(pid, "unisono-stack-server") as file:
        number = _HEAD.unpack(os.pread(file, _HEAD.size, 0))[2]
    return _ask_by_signal(child, number)


def _is_locked(file: int) -> bool:
    """Lock a file until it is closed; returns False if another process has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _pause() -> None:
    answer_if_asked()
    time.sleep(_LOOK_S)
