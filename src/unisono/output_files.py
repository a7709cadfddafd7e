"""Opening files that a user names for output. A FIFO's open waits for its reader: here it fails."""

from __future__ import annotations

import errno
import os
import tempfile


def open_at_once(path: str, flags: int) -> int:
    """An opener for `open`. Raises OSError if `path` is a FIFO that no process reads."""
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ENXIO:
            error.strerror = "it is a FIFO that no process reads: start its reader, or name a file"
        raise
    os.set_blocking(descriptor, True)
    return descriptor


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Like `Path.write_text`. Raises OSError."""
    with open(path, "w", encoding="utf-8", opener=open_at_once) as file:
        file.write(text)


def temporary_folder() -> str:
    """Where programs of this machine write temporary files: never the current folder, where
    Python's `tempfile` ends up if there is no other. Raises OSError."""
    folder = tempfile.gettempdir()
    named = [os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP")]
    if folder == os.getcwd() and folder not in named:
        raise FileNotFoundError("there is no folder for temporary files")
    return folder
