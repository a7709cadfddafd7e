"""Processes as the system knows them: whether they live, and which of them are ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass

from unisono.comm.shared_memory.records import segments_of
from unisono.errors import UnisonoError

_STATES = {"T": "is stopped", "t": "is stopped by a debugger", "D": "waits for the system"}
_STATES |= {"R": "is running", "S": "is asleep", "Z": "has ended", "X": "has ended"}


@dataclass(frozen=True)
class ProcessState:
    """What a process does by /proc."""

    pid: int
    letter: str

    @property
    def has_ended(self) -> bool:
        return self.letter in ("", "Z", "X")

    @property
    def is_stopped(self) -> bool:
        return self.letter in ("T", "t")

    def __str__(self) -> str:
        return _STATES.get(self.letter, "has ended")


def state_of(pid: int) -> ProcessState:
    """What a process does; one that is gone has ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            letter = file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        letter = ""
    return ProcessState(pid, letter)


def kernel_function(pid: int) -> str:
    """In which system call a process is, for those that cannot tell themselves; "" if unknown."""
    try:
        with open(f"/proc/{pid}/wchan") as file:
            place = file.read().strip()
    except OSError:
        return ""
    return "" if place in ("0", "") else place


def ranks_of_this_user() -> list[int]:
    """The processes of this user that are in a group, native or watched."""
    me = os.geteuid()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            if os.stat(f"/proc/{name}").st_uid == me and segments_of(int(name)):
                found.append(int(name))
        except (OSError, UnisonoError):
            continue
    return sorted(found)


def command_of(pid: int) -> str:
    """The command line of a process, as short as it can be told."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return "?"
    if "-c" in words[:6]:  # a rank of a launch: its parent's command tells more
        parent = parent_of(pid)
        return command_of(parent) if parent > 1 else "?"
    words = [os.path.basename(word) if os.sep in word else word for word in words]
    return " ".join(words[1:] if words and words[0].startswith("python") else words) or "?"


def parent_of(pid: int) -> int:
    """The process that started this one; 0 where that is not known."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0
