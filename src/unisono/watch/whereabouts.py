"""Where a process is: from its stacks if it sends them, else from the system."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from unisono.comm.shared_memory.records import Process
from unisono.errors import UnisonoError
from unisono.processes import children_of, describe_zombie, kernel_function, state_of
from unisono.watch.stack_server import ask, ask_child
from unisono.watch.stacks import (
    IN_FUTURE,
    Stack,
    as_text,
    is_users,
    lines_around,
    of_program,
    short_path,
)

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_CALLS = ("wait", "synchronize", "barrier", "send", "recv", "reduce", "gather", "scatter")
_MOST_LINES = 40
_CALLERS = 4
_MOST_CHILDREN = 4
_WAITS = ("get", "join", "acquire", "wait", "result")
"""Names of calls in which a program waits for its own threads."""
GIL = "which keeps the GIL"


@dataclass(frozen=True)
class Whereabouts:
    """Where a process is. `state` is set if it cannot go on: it has ended, or is stopped.

    `location` is its line ("data.py:41 in load"), `doing` what that line calls, `in_call` whether
    its stack is inside a communication library; `source` are the lines around `location`, `callers`
    the user's lines that led there, the nearest first. `phase` is its part of the iteration,
    `key` what it waits for in torch's Store, `written` keys that it has set there.
    `failures` are threads, and tasks of thread pools, that exceptions ended, `notes` are about its
    children; `is_abandoned`: it waits, perhaps for a thread that died. `is_described` unless no
    process of its host says more.
    """

    state: str = ""
    location: str = ""
    doing: str = ""
    in_call: bool = True
    stack: tuple[str, ...] = ()
    source: tuple[str, ...] = ()
    callers: tuple[str, ...] = ()
    phase: str = ""
    key: str = ""
    written: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    is_abandoned: bool = False
    is_described: bool = True


Ask = Callable[[Process], Whereabouts]


def whereabouts(
    pid: int, endings: Mapping[int, str] | None = None, with_children: bool = True
) -> Whereabouts:
    """Where process `pid` is. `endings` says how processes ended, if known; `with_children` also
    interrupts its forked children."""
    state = state_of(pid)
    if state.has_ended:
        how = (endings or {}).get(pid) or describe_zombie(pid) or "has ended"
        return Whereabouts(state=how)
    if state.is_stopped:
        return Whereabouts(state=str(state))
    stacks = ask(pid)
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
        notes=(*(_of_children(pid) if with_children else ()),),
        is_abandoned=any(not stack.ended.endswith(IN_FUTURE) for stack in ended)
        and doing.rpartition(".")[2] in _WAITS,
    )


def _of_children(pid: int) -> list[str]:
    """Where the forked children of a watched process are, if they are in the user's code."""
    found = []
    for child in children_of(pid)[:_MOST_CHILDREN]:
        with contextlib.suppress(OSError, UnisonoError):
            for stack in ask_child(pid, child)[:1]:
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
