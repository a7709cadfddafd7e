"""Where a process is: from its stacks if it sends them, else from the system.

The stack server: a process answers other processes of its user that ask for its stacks.

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
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import takewhile

from unisono.errors import UnisonoError
from unisono.processes import (
    busy_threads,
    children_of,
    describe_zombie,
    handles_signal,
    kernel_function,
    signal_thread,
    state_of,
)
from unisono.watch.garbage import Collections
from unisono.watch.memory_files import open_memory
from unisono.watch.report import build
from unisono.watch.stacks import (
    IN_FUTURE,
    Stack,
    as_text,
    ended_threads,
    failed_tasks,
    from_faulthandler,
    is_users,
    lines_around,
    note_ended_thread,
    note_failed_tasks,
    of_program,
    own_stacks,
    short_path,
)
from unisono.watch.store_calls import follow_store
from unisono.watch.whereabouts import Whereabouts

DEFAULT_SIGNAL = signal.SIGRTMIN + 8 if hasattr(signal, "SIGRTMIN") else 0
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
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_CALLS = ("wait", "synchronize", "barrier", "send", "recv", "reduce", "gather", "scatter")
_MOST_LINES = 40
_CALLERS = 4
_MOST_CHILDREN = 4
_MOST_THREADS = 4
_WAITS = ("get", "join", "acquire", "wait", "result")
"""Names of calls in which a program waits for its own threads."""
GIL = "which keeps the GIL"
_childs_files: list[int] = []
"""In a forked child: where it writes its stacks."""


class StackServer:
    """This process's own. `number` is the reserved signal, 0 for none."""

    def __init__(self, number: int) -> None:
        self._file = os.memfd_create("unisono-stack-server", os.MFD_CLOEXEC)
        self._stacks = os.memfd_create("unisono-stacks", os.MFD_CLOEXEC)
        self._signal = _reserve(number, self._stacks)
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
            "its stack while it holds the GIL; choose another signal (UNISONO_WATCH_SIGNAL)",
            number,
        )
        return 0
    faulthandler.register(number, descriptor, all_threads=False)
    return number


def request_stacks(pids: Iterable[int]) -> None:
    """Ask several processes at once, so that `ask` finds answers."""
    for pid in set(pids) - {os.getpid()}:
        with (
            contextlib.suppress(OSError, ValueError, UnisonoError),
            open_memory(pid, "unisono-stack-server") as file,
            mmap.mmap(file, _BYTES) as memory,
        ):
            _post(memory)


def ask(pid: int, meanwhile: Callable[[], object] = lambda: None) -> list[Stack]:
    """The stacks of a process, the main thread's first; none if it does not answer.

    `meanwhile` is called while we wait, so that we can answer questions, too.
    """
    if pid == os.getpid():
        return own_stacks()
    try:
        with open_memory(pid, "unisono-stack-server") as file, mmap.mmap(file, _BYTES) as memory:
            return _ask_server(pid, memory, meanwhile)
    except (OSError, ValueError, UnisonoError):
        return []


def _ask_server(pid: int, memory: mmap.mmap, meanwhile: Callable[[], object]) -> list[Stack]:
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
        _pause(meanwhile)
    return _ask_by_signal(pid, number, meanwhile) if number else []


def _post(memory: mmap.mmap) -> int:
    """Ask, unless another process just has; returns the number of the question."""
    (asked,) = _INTEGER.unpack_from(memory, _ASKED)
    answered, at_s = _ANSWER.unpack_from(memory, _ANSWERED)
    if asked == answered and time.monotonic() - at_s > _FRESH_S:
        asked += 1
        _INTEGER.pack_into(memory, _ASKED, asked)
    return int(asked)


def _ask_by_signal(pid: int, number: int, meanwhile: Callable[[], object]) -> list[Stack]:
    found: list[Stack] = []
    with open_memory(pid, "unisono-stacks") as file:
        while not _is_locked(file):  # another process asks
            _pause(meanwhile)
        for thread in busy_threads(pid, number)[:_MOST_THREADS]:
            if not handles_signal(pid, number):  # a library took the handler: it would kill
                break
            before = os.fstat(file).st_size
            signal_thread(pid, thread, number)
            end, sizes = time.monotonic() + _SIGNAL_S, [before]
            while time.monotonic() < end and not before < sizes[-1] == sizes[-2]:
                _pause(meanwhile)
                sizes.append(os.fstat(file).st_size)
            text = os.pread(file, sizes[-1] - before, before).decode(errors="replace")
            if frames := from_faulthandler(text):
                found.append(Stack("MainThread" if thread == pid else f"thread {thread}", frames))
    return found


def _is_locked(file: int) -> bool:
    """Lock a file until it is closed; returns False if another process has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _pause(meanwhile: Callable[[], object]) -> None:
    meanwhile()
    time.sleep(_LOOK_S)


def whereabouts(
    pid: int,
    endings: Mapping[int, str] | None = None,
    meanwhile: Callable[[], object] = lambda: None,
    with_children: bool = True,
) -> Whereabouts:
    """Where process `pid` is. `endings` says how processes ended, if known; `with_children` also
    interrupts its forked children."""
    state = state_of(pid)
    if state.has_ended:
        how = (endings or {}).get(pid) or describe_zombie(pid) or "has ended"
        return Whereabouts(state=how)
    if state.is_stopped:
        return Whereabouts(state=str(state))
    stacks = ask(pid, meanwhile)
    if not stacks:
        kernel = kernel_function(pid)
        text = f"{state} and does not answer" + (f", in {kernel}" if kernel else "")
        return Whereabouts(doing=text, stack=(text,))
    program = of_program(stacks)
    frame = program.program_frame()
    lines = as_text(stack for stack in stacks if not stack.thread.startswith("unisono"))
    doing = frame.doing if frame else ""
    if program.keeps_gil:
        doing += f"{doing and ', in '}thread {program.thread}, {GIL}"
    ended = [stack for stack in stacks if stack.ended]
    return Whereabouts(
        location=str(frame) if frame else "",
        doing=doing,
        in_call=is_in_call(stacks, program),
        stack=tuple(lines[:_MOST_LINES]),
        source=lines_around(frame.file, frame.line) if frame else (),
        callers=tuple(str(found) for found in program.frames if is_users(found.file))[1:_CALLERS],
        phase=stacks[0].phase,
        key=program.key,
        written=program.written,
        failures=tuple(f"thread {stack.thread} {stack.ended}" for stack in ended),
        notes=(*(_of_children(pid, meanwhile) if with_children else ()),),
        is_abandoned=any(not stack.ended.endswith(IN_FUTURE) for stack in ended)
        and doing.rpartition(".")[2] in _WAITS,
    )


def _of_children(pid: int, meanwhile: Callable[[], object]) -> list[str]:
    """Where the forked children of a watched process are, if they are in the user's code."""
    found = []
    for child in children_of(pid)[:_MOST_CHILDREN]:
        with contextlib.suppress(OSError, UnisonoError):
            with open_memory(pid, "unisono-stack-server") as file:
                number = _HEAD.unpack(os.pread(file, _HEAD.size, 0))[2]
            for stack in _ask_by_signal(child, number, meanwhile)[:1]:
                own = takewhile(lambda frame: frame.function != "_bootstrap", stack.frames)
                frame = next((frame for frame in own if is_users(frame.file)), None)
                if frame is not None:
                    doing = f", in {frame.doing}" if frame.doing else ""
                    at = f"{short_path(frame.file)}:{frame.line}"
                    found.append(f"child process {child} is in {at}{doing}")
    return found


def is_in_call(stacks: Sequence[Stack], program: Stack) -> bool:
    """Whether the program, or another thread, waits in a communication library."""
    torch = (
        os.path.dirname(getattr(sys.modules.get("torch"), "__file__", None) or "/torch") + os.sep
    )
    folders = (_PACKAGE, f"{torch}distributed{os.sep}")
    for stack in stacks:
        frames = [frame for frame in stack.frames if frame.file != threading.__file__]
        if not frames or stack.ended or stack.thread.startswith("unisono"):
            continue
        innermost = frames[0]  # of the waiting code, not of the functions it waits in
        if innermost.file.startswith(folders):
            return True
        if stack is program and (
            (innermost is stack.frames[0] and innermost.doing.endswith(_CALLS))
            or innermost.file.startswith(f"{torch}autograd{os.sep}")
        ):
            return True
    return False
