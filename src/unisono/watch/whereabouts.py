"""Where a process is: by its stacks where it sends them, else by what the system says of it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence

from unisono.processes import describe_zombie, kernel_function, state_of
from unisono.watch import stack_server
from unisono.watch.diagnose import Whereabouts
from unisono.watch.stacks import Stack, as_text, lines_around, of_program

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_CALLS = ("wait", "synchronize", "barrier", "send", "recv", "reduce", "gather", "scatter")
_MOST_LINES = 40


def whereabouts(
    pid: int,
    endings: Mapping[int, str] | None = None,
    meanwhile: Callable[[], object] = lambda: None,
) -> Whereabouts:
    """Where process `pid` is. `endings` says how processes ended, as far as that is known."""
    state = state_of(pid)
    if state.has_ended:
        how = (endings or {}).get(pid) or describe_zombie(pid) or "has ended"
        return Whereabouts(state=how)
    if state.is_stopped:
        return Whereabouts(state=str(state))
    stacks = stack_server.ask(pid, meanwhile)
    if not stacks:
        kernel = kernel_function(pid)
        text = f"{state} and does not say where" + (f", in {kernel}" if kernel else "")
        return Whereabouts(doing=text, stack=(text,))
    program = of_program(stacks)
    frame = program.program_frame()
    lines = as_text(stack for stack in stacks if not stack.thread.startswith("unisono"))
    return Whereabouts(
        location=str(frame) if frame else "",
        doing=frame.doing if frame else "",
        in_call=is_in_call(stacks, program),
        stack=tuple(lines[:_MOST_LINES]),
        source=lines_around(frame.file, frame.line) if frame else (),
    )


def is_in_call(stacks: Sequence[Stack], program: Stack) -> bool:
    """Whether the program, or another thread, waits in a communication library."""
    torch = (
        os.path.dirname(getattr(sys.modules.get("torch"), "__file__", None) or "/torch") + os.sep
    )
    folders = (_PACKAGE, f"{torch}distributed{os.sep}")
    for stack in stacks:
        frames = [frame for frame in stack.frames if frame.file != threading.__file__]
        if not frames or stack.thread.startswith("unisono"):
            continue
        innermost = frames[0]  # of those who wait, not of the means by which they do
        if innermost.file.startswith(folders):
            return True
        if stack is program and (
            innermost.doing.rpartition(".")[2].endswith(_CALLS)
            or innermost.file.startswith(f"{torch}autograd{os.sep}")
        ):
            return True
    return False
