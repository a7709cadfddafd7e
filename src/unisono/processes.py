"""Processes: as /proc shows them; how they are started, write their stacks and end.

The engine reads what it needs by itself; all of Python uses this module.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.errors import UnisonoError

if TYPE_CHECKING:
    import subprocess

_STATES = {"T": "is stopped", "t": "is stopped by a debugger", "D": "is blocked in the kernel"}
_STATES |= {"R": "is running", "S": "is asleep", "I": "is idle", "Z": "has ended", "X": "has ended"}
_PR_SET_PDEATHSIG = 1
_PR_SET_PTRACER = 0x59616D61
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")

STACK_SIGNAL = getattr(signal, "SIGRTMIN", 0) + 7
"""Makes a rank of a launch or a test write its stack; no program uses this number."""

# fields of /proc/PID/stat, counted from the end of the command's name
_STATE, _PARENT, _START_TIME, _EXIT_STATUS = 0, 1, 19, 49


@functools.cache
def boot_id() -> str:
    """An ID of this boot of this machine, unlike any other. Raises OSError if there is no /proc."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except FileNotFoundError:
        raise FileNotFoundError("unisono needs /proc: run mount -t proc proc /proc") from None


def namespace(kind: str) -> int:
    """The number of this process's namespace of a kind ("pid", "net"). Raises OSError."""
    return os.stat(f"/proc/self/ns/{kind}").st_ino


def start_time(pid: int) -> str:
    """When a process started, which tells it from a later one with the same PID. Raises OSError
    if it cannot be seen."""
    return _read_stat(pid)[_START_TIME]


def parent_of(pid: int) -> int:
    """The process that started this one; 0 if unknown."""
    try:
        return int(_read_stat(pid)[_PARENT])
    except OSError:
        return 0


def children_of(pid: int) -> list[int]:
    """The processes that this one has started and not yet waited for."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, path.read_text().split())
    return found


class ProcessState:
    """What a process does. `letter` is the one of ps, and "" if the process cannot be seen: it
    is gone, or in another PID namespace."""

    def __init__(self, letter: str) -> None:
        self.letter = letter

    @property
    def has_ended(self) -> bool:
        return self.letter in ("", "Z", "X")

    @property
    def is_stopped(self) -> bool:
        return self.letter in ("T", "t")

    def __str__(self) -> str:
        """Completes a sentence that begins with the process."""
        return (
            _STATES.get(self.letter, f"is in state {self.letter}") if self.letter else "has ended"
        )


def state_of(pid: int) -> ProcessState:
    """What a process does."""
    try:
        return ProcessState(_read_stat(pid)[_STATE])
    except OSError:
        return ProcessState("")


def handles_signal(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal, and so would survive it."""
    return _has_signal(Path(f"/proc/{pid}/status"), "SigCgt:", number)


def busy_threads(pid: int, number: int) -> list[int]:
    """The threads of a process that may hold the GIL, its main thread first, unless they block
    signal `number`: not those that wait for a lock or in a poll."""
    found = [
        int(task.name)
        for task in Path(f"/proc/{pid}/task").glob("*")
        if (int(task.name) == pid or _is_busy(task))
        and not _has_signal(task / "status", "SigBlk:", number)
    ]
    return sorted(found, key=lambda thread: (thread != pid, thread))


def _is_busy(task: Path) -> bool:
    try:
        state = (task / "stat").read_text().rpartition(")")[2].split()[_STATE]
        where = (task / "wchan").read_text()
    except OSError:
        return False
    return state == "R" or not (where == "0" or re.search("futex|poll|select", where))


def _has_signal(status: Path, mask: str, number: int) -> bool:
    try:
        _, _, found = status.read_text().partition(mask)
    except OSError:
        return False
    return bool(found and int(found.split(maxsplit=1)[0], 16) >> (number - 1) & 1)


def signal_thread(pid: int, thread: int, number: int) -> None:
    """Send a signal to one thread of a process; before glibc 2.30 to main threads only."""
    import ctypes

    libc = ctypes.CDLL(None)
    if hasattr(libc, "tgkill"):
        libc.tgkill(pid, thread, number)
    elif thread == pid:
        os.kill(pid, number)


def write_stacks_to(file: Any) -> None:
    """Have this process write its stacks to a file or descriptor: if it is asked, or crashes."""
    import faulthandler

    faulthandler.enable(file)
    faulthandler.register(STACK_SIGNAL, file, all_threads=True)


def ask_for_stack(pid: int) -> bool:
    """Ask a rank to write its stack; returns whether it will. A program may have reset every
    signal to its default, as Lightning's Trainer does, and this one would kill it."""
    if not handles_signal(pid, STACK_SIGNAL):
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, STACK_SIGNAL)
    return True


def kernel_function(pid: int) -> str:
    """The kernel function in which a process sleeps; "" if unknown."""
    try:
        name = Path(f"/proc/{pid}/wchan").read_text().strip()
    except OSError:
        return ""
    return "" if name == "0" else name


def command_of(pid: int) -> str:
    """The command line of a process, without folders and the interpreter; "?" if it has ended."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return "?"
    parts = arguments.split("\0")[:-1]
    if "main(" in arguments.partition("\0-c\0")[2] and (above := command_of(parent_of(pid))) != "?":
        return above  # a rank of a launch, or of multiprocessing: its parent's command says more
    parts = [part if " " in part else os.path.basename(part) or part for part in parts]
    words = parts[1:] if parts and parts[0].startswith("python") else parts
    return " ".join(" ".join(words or parts or "?").split())


# -- starting and ending -----------------------------------------------------------------------


def start_python(
    *arguments: object, environment: Mapping[str, str], inherit: Sequence[int], **more: Any
) -> subprocess.Popen[bytes]:
    """Start Python with this process's options, these arguments and these descriptors, without
    input, and in a process group of its own, so that it can be killed with its children."""
    import subprocess

    if not sys.executable:
        raise UnisonoError("cannot start ranks: sys.executable names no Python interpreter")
    options: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return subprocess.Popen(
        [sys.executable, *options, *map(str, arguments)],
        env=environment,
        stdin=subprocess.DEVNULL,
        pass_fds=inherit,
        process_group=0,
        **more,
    )


def end_with_parent(parent_pid: int) -> None:
    """Make the kernel kill this process when its parent ends."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it had already ended
        os.kill(os.getpid(), signal.SIGKILL)


def let_siblings_read(parent_pid: int) -> None:
    """Where Yama lets only ancestors read a process's memory, also allow the parent of this rank
    and its other children, the other ranks."""
    import ctypes

    with contextlib.suppress(OSError):
        if _YAMA.read_text().strip() == "1":
            ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(parent_pid), 0, 0, 0)


def describe_exit(code: int) -> str:
    """ "was killed by SIGKILL", "exited with code 3"; `code` is negative for a signal, as in
    subprocess."""
    return f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"


def signal_name(number: int) -> str:
    """ "SIGKILL", and "signal 40" for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_zombie(pid: int) -> str:
    """How a process failed that has ended and that its parent has not waited for; "" if unknown,
    or if it did not fail."""
    try:
        status = int(_read_stat(pid)[_EXIT_STATUS])
        return describe_exit(os.waitstatus_to_exitcode(status)) if status else ""
    except (OSError, IndexError, ValueError):
        return ""


def _read_stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the command, which may contain spaces and brackets."""
    text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    fields = text.rpartition(")")[2].split()
    if not fields:
        raise ProcessLookupError(f"process {pid} ended while it was read")
    return fields
