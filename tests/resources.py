"""Resources of a process or a meeting that must be released."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from pathlib import Path
from typing import TypeAlias

from unisono.comm.meeting.meeting_points import file_of

Resources: TypeAlias = tuple[dict[str, str], Counter[str], str]


def held_resources() -> Resources:
    """Open descriptors, the names of threads, and children, of this process."""
    descriptors = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            descriptors[number] = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue  # the folder's own
    threads: Counter[str] = Counter()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            threads[(task / "comm").read_text().strip()] += 1
    with open(f"/proc/self/task/{os.getpid()}/children") as children:
        return descriptors, threads, children.read()


def assert_given_back(before: Resources, when: str = "afterwards") -> None:
    """Check that everything acquired since `before` has been released. What an earlier job of this
    process still held then may be gone, too."""
    end = time.monotonic() + 5
    while not _is_within(now := held_resources(), before) and time.monotonic() < end:
        time.sleep(0.001)  # a joined thread may still be exiting
    assert _is_within(now, before), f"{when} this process has\n{now}\nand not\n{before}"


def _is_within(now: Resources, before: Resources) -> bool:
    descriptors, threads, children = now
    return (
        descriptors.items() <= before[0].items()
        and threads <= before[1]
        and set(children.split()) <= set(before[2].split())
    )


def meeting_files(name: str) -> list[Path]:
    """The files through which processes meet under `name`."""
    folders = (Path("/tmp"), Path(f"/run/user/{os.geteuid()}"))
    return [file for folder in folders for file in folder.glob(f"*{file_of(name)}*")]


def is_announced(name: str) -> bool:
    """Whether rank 0 has written its address, and no temporary copy exists."""
    files = meeting_files(name)
    return bool(files) and not any(file.name.startswith(".") for file in files)


def waits_at_a_meeting(pid: int) -> bool:
    """Whether a process holds its two sockets, its name and its server, so it has begun to wait."""
    links = []
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        try:
            links.append(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
        except OSError:
            continue  # it has just been closed
    return sum(link.startswith("socket:") for link in links) >= 2
