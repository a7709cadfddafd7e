"""Anonymous files of watched processes, which other processes of the same user find in /proc."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from unisono.errors import UnisonoError


@contextlib.contextmanager
def open_memory(pid: int, name: str) -> Iterator[int]:
    """An anonymous file of a process, by its name in /proc."""
    folder = f"/proc/{pid}/fd"
    for entry in os.listdir(folder):
        path = f"{folder}/{entry}"
        with contextlib.suppress(OSError):
            if os.readlink(path).startswith(f"/memfd:{name} ("):
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                break
    else:
        raise UnisonoError(f"process {pid} has no {name}")
    try:
        yield descriptor
    finally:
        os.close(descriptor)
