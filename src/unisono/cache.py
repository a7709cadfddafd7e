"""The user's cache folder: where unisono keeps what can be measured again."""

from __future__ import annotations

import contextlib
import os

from unisono import variables


def cache_folder() -> str:
    """UNISONO_CACHE, $XDG_CACHE_HOME/unisono or ~/.cache/unisono; it need not exist."""
    chosen = variables.CACHE.read()
    if chosen is not None:
        return chosen
    base = os.environ.get("XDG_CACHE_HOME", "")
    home = base if os.path.isabs(base) else os.path.expanduser("~/.cache")
    return os.path.join(home, "unisono")


def write_whole(path: str, text: str) -> None:
    """Write a file, with its folder, that nobody else may read: all of it, or nothing has changed.

    Raises OSError.
    """
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    draft = f"{path}.{os.urandom(8).hex()}"
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise
