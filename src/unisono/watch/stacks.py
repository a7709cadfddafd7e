"""Stacks of a process: its own, and those written by faulthandler; and which line is the user's."""

from __future__ import annotations

import functools
import linecache
import os
import re
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice
from types import CodeType, FrameType
from typing import Any

from unisono.watch import steps, store_calls

_FAULTHANDLER_LINE = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_STRING = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""")
_BRACKETS = re.compile(r"[(\[{][^()\[\]{}]*[)\]}]")
_NAME = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*")
_CALL = re.compile(r"([A-Za-z_][\w.]*)\(")
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_HIDDEN = (_PACKAGE + os.sep, os.path.dirname(os.__file__) + os.sep)
_MOST_FRAMES = 500
_LINES_BEFORE, _LINES_AFTER = 5, 3
WATCHING = "unisono watch"
"""The name of the watching thread."""

_LONGEST_NAME = 80
_MOST_ENDED = 8
_WAKES, _NAP_S, _RAN_S = 8, 0.0005, 0.002


@dataclass(frozen=True)
class Frame:
    """One line of a stack. `doing` is what it calls, as written in the source: lock.acquire."""

    file: str
    line: int
    function: str
    doing: str = ""

    def __str__(self) -> str:
        return f"{short_path(self.file)}:{self.line} in {self.function}"


@dataclass(frozen=True)
class Stack:
    """A thread's frames, innermost first. `ended` says which exception ended the thread, if one
    did; for the main thread `phase` is the part of the iteration, if known. `key` is the key of
    torch's Store that it waits for, `written` are those that its process has set; `keeps_gil`: it
    runs while the others wait for the GIL."""

    thread: str
    frames: tuple[Frame, ...]
    ended: str = ""
    phase: str = ""
    key: str = ""
    written: tuple[str, ...] = ()
    keeps_gil: bool = False

    def program_frame(self) -> Frame | None:
        """The innermost frame of the user's program, or else of any."""
        own = (frame for frame in self.frames if is_users(frame.file))
        return next(own, self.frames[0] if self.frames else None)


ended_threads: deque[Stack] = deque(maxlen=_MOST_ENDED)
"""Threads of this process that exceptions have ended, while it was watched."""
IN_FUTURE = ", and a future holds it"
failed_tasks: deque[tuple[weakref.ref[Future[Any]], int, Stack]] = deque(maxlen=_MOST_ENDED)
"""Tasks of its thread pools that exceptions have ended: the future, where its traceback began."""


def of_program(stacks: Sequence[Stack]) -> Stack:
    """The stack that shows where the program is: the main thread's, unless another one keeps the
    GIL, or only another one is in the user's files."""
    own = [
        stack
        for stack in stacks
        if not stack.ended and any(is_users(frame.file) for frame in stack.frames)
    ]
    return next((stack for stack in own if stack.keeps_gil), (own or stacks)[0])


def own_stacks() -> list[Stack]:
    """The stacks of all threads of this process except the watching one, the main thread's first;
    and of threads that an exception has ended."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, keeper = threading.main_thread().ident, _gil_keeper()
    frames = sys._current_frames()
    order = sorted(frames, key=lambda ident: ident != main)
    living = [
        Stack(
            name,
            _frames_of(frames[ident]),
            phase=steps.phase if ident == main else "",
            key=store_calls.awaited.get(ident, ""),
            written=tuple(store_calls.written),
            keeps_gil=ident == keeper,
        )
        for ident in order
        if (name := names.get(ident, f"thread {ident}")) != WATCHING
    ]
    frames.clear()  # this one, too: it would keep all others, and what they hold
    tasks = [stack for future, begin, stack in failed_tasks if not _was_raised(future(), begin)]
    return [*living, *ended_threads, *tasks]


def _gil_keeper() -> int | None:
    """The thread that runs while this one waits for the GIL, most of the times that it wakes up."""
    aside = (threading.main_thread(), threading.current_thread())
    others = [each for each in threading.enumerate() if each not in aside]
    before = [_ran_s(thread) for thread in others]
    begin = time.monotonic()
    for _ in range(_WAKES if others else 0):
        time.sleep(_NAP_S)
    if time.monotonic() - begin < _WAKES * sys.getswitchinterval() / 2:
        return None
    ran = [_ran_s(thread) - since_s for thread, since_s in zip(others, before, strict=True)]
    busy = [thread.ident for thread, ran_s in zip(others, ran, strict=True) if ran_s > _RAN_S]
    return busy[0] if len(busy) == 1 else None


def _ran_s(thread: threading.Thread) -> float:
    """How long a thread has run on a processor; 0.0 if the system does not say."""
    try:
        with open(f"/proc/self/task/{thread.native_id}/schedstat") as file:
            return int(file.read().split()[0]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def note_ended_thread(thread: threading.Thread | None, error: BaseException) -> None:
    """Remember which exception ended a thread, and where."""
    ended_threads.append(_end_of(thread, error))


def _end_of(thread: threading.Thread | None, error: BaseException, more: str = "") -> Stack:
    found = traceback.extract_tb(error.__traceback__)
    frames = (Frame(at.filename, at.lineno or 0, at.name) for at in reversed(found))
    return Stack(thread.name if thread else "?", (*frames,), describe_error(error) + more)


def note_failed_tasks() -> Callable[[], None]:
    """From now on remember the exceptions that end tasks of thread pools: no hook of Python's sees
    them, and without a reader nobody does. Returns what stops it."""
    usual = Future.set_exception

    def set_exception(future: Future[Any], error: BaseException | None) -> None:
        usual(future, error)
        if error is not None:
            stack = _end_of(threading.current_thread(), error, IN_FUTURE)
            failed_tasks.append((weakref.ref(future), id(error.__traceback__), stack))

    Future.set_exception = set_exception  # type: ignore[method-assign, assignment]

    def stop() -> None:
        if Future.set_exception is set_exception:
            Future.set_exception = usual  # type: ignore[method-assign]

    return stop


def _was_raised(future: Future[Any] | None, begin: int) -> bool:
    """Whether `result` has raised a future's exception, so that its traceback begins elsewhere."""
    error = None if future is None else future.exception(0)
    return error is not None and id(error.__traceback__) != begin


def describe_error(error: BaseException, with_text: bool = True) -> str:
    """ "raised ValueError (no such file) at data.py:41 in load" """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_users(frame.filename)] or frames[-1:]
    at = f" at {short_path(own[-1].filename)}:{own[-1].lineno} in {own[-1].name}" if own else ""
    text = str(error).strip().partition("\n")[0][:100] if with_text else ""
    return f"raised {type(error).__name__}{f' ({text})' if text else ''}{at}"


def calling_line(frame: FrameType | None = None) -> str:
    """The line of the user's program that led here, or to `frame`: "train.py:88"; "" if there is
    none."""
    frame = frame or sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno}"


def from_faulthandler(text: str) -> tuple[Frame, ...]:
    """The frames in faulthandler's output for one thread; none if it does not run Python."""
    frames = []
    for found in filter(None, map(_FAULTHANDLER_LINE.match, text.splitlines())):
        file, number = found["file"], int(found["line"])
        call = _CALL.search(linecache.getline(file, number))
        frames.append(Frame(file, number, found["function"], call[1] if call else ""))
    return tuple(frames)


def short_path(file: str) -> str:
    """A file as seen from the current folder, or its last two parts."""
    folder = _current_folder() + os.sep
    if file.startswith(folder):
        return file.removeprefix(folder)
    return os.sep.join(file.split(os.sep)[-2:]) if not is_users(file) else os.path.basename(file)


def _current_folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return os.devnull


@functools.lru_cache(4096)
def is_users(file: str) -> bool:
    """Whether a file belongs to the user's program: not to Python, torch, unisono or a package."""
    if file.startswith("<") and file != "<stdin>":
        return False
    return not file.startswith(_HIDDEN) and "-packages" + os.sep not in file


def _frames_of(frame: FrameType | None) -> tuple[Frame, ...]:
    frames: list[Frame] = []
    while frame is not None and len(frames) < _MOST_FRAMES:
        code = frame.f_code
        doing = _doing(code, frame.f_lasti)
        frames.append(Frame(code.co_filename, frame.f_lineno or 0, code.co_qualname, doing))
        frame = frame.f_back
    return tuple(frames)


@functools.lru_cache(1024)
def _doing(code: CodeType, at: int) -> str:
    """What the expression at this position of the code calls."""
    line, last_line, column, last_column = next(islice(code.co_positions(), at // 2, None))
    if line is None or column is None or last_line != line:
        return ""
    text = linecache.getline(code.co_filename, line).encode()[column:last_column]
    return callee_of(text.decode(errors="replace"))


def callee_of(expression: str) -> str:
    """What an expression calls: "lock.acquire" of "lock.acquire(timeout=3)"; "" if nothing.

    It works on the text because `ast.parse` in CPython 3.11 may raise SystemError if two threads
    are in it: ours must not break the program's.
    """
    text = _STRING.sub("''", expression.strip())
    if not text.endswith(")"):
        return ""
    depth = 0
    for at in range(len(text) - 1, -1, -1):
        depth += (text[at] in ")]}") - (text[at] in "([{")
        if depth == 0:
            break
    name = text[:at]
    bare = name
    while bare != (bare := _BRACKETS.sub("", bare)):
        pass
    return name if _NAME.fullmatch(bare) and len(name) <= _LONGEST_NAME else ""


def lines_around(file: str, line: int) -> tuple[str, ...]:
    """The source around a line, each with its number, a ">" before the line itself; none if the
    file cannot be read."""
    linecache.checkcache(file)
    source = linecache.getlines(file)
    if not 1 <= line <= len(source):
        return ()
    first = max(1, line - _LINES_BEFORE)
    return tuple(
        f"{'>' if number == line else ' '} {number:4}  {text.rstrip()}"
        for number, text in enumerate(source[first - 1 : line + _LINES_AFTER], first)
    )


def lines_of_site(site: str) -> tuple[str, ...]:
    """The same for a line from a report ("train.py:88"), if this process knows the file."""
    name, _, line = site.partition(" in ")[0].rpartition(":")
    if not name or not line.isdigit():
        return ()
    loaded = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    known = [file for file in loaded if file and file.endswith(os.sep + name)]
    files = [os.path.join(_current_folder(), file) for file in (name, *known)]
    found = next((file for file in files if os.path.isfile(file)), "")
    return lines_around(found, int(line)) if found else ()


def as_text(stacks: Iterable[Stack]) -> list[str]:
    """The stacks for a reader, one line per frame."""
    lines = []
    for stack in stacks:
        lines.append(f"{stack.thread}{stack.ended and f' {stack.ended}'}:")
        lines += [f"  {frame}" for frame in stack.frames]
    return lines
