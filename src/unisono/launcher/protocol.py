"""The messages between the launching process and its ranks."""

from __future__ import annotations

import contextlib
import os
import pickle
import struct
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any

STARTED = b"S"
FINISHED = b"E"
VALUE = b"V"
FAILED = b"F"

_HEAD = struct.Struct("<cQ")


@dataclass(frozen=True)
class Instructions:
    """What every rank of a launch reads first.

    `program` is a file or, if `is_module`, a module as for `python -m`; "" if a pickled function
    follows in the same file. `sources` are texts of code that is in no file, as in a notebook, for
    tracebacks. `store_fd` is an inherited file for torch's store, -1 if there is another store.
    """

    sys_path: tuple[str, ...]
    argv: tuple[str, ...]
    program: str = ""
    is_module: bool = False
    pins: tuple[tuple[int, ...], ...] = ()
    sources: dict[str, list[str]] = field(default_factory=dict)
    store_fd: int = -1


@dataclass(frozen=True)
class Failure:
    """An exception that ended a rank. `follows`: another rank's end caused it; `is_own`: it is not
    about other ranks; `how` is one line with the program's line; `exit_code` is the rank's."""

    exit_code: int
    summary: str
    traceback: str
    follows: bool
    is_own: bool
    how: str


def nameless_file() -> IO[bytes]:
    """An anonymous file, which vanishes with its last holder."""
    try:
        return os.fdopen(os.memfd_create("unisono-launch"), "w+b")
    except (AttributeError, OSError):  # not allowed in some sandboxes
        import tempfile

        return tempfile.TemporaryFile(prefix="unisono-")


@contextlib.contextmanager
def above_the_streams() -> Iterator[None]:
    """Descriptors opened meanwhile get numbers above 2, even if this process was started without
    standard streams: a rank's own streams would replace anything it inherits as 0 to 2."""
    opened: list[int] = []
    try:
        while (filler := os.open(os.devnull, os.O_RDWR)) <= 2:
            opened.append(filler)
        os.close(filler)
        yield
    finally:
        for number in opened:
            os.close(number)


def write_instructions(instructions: Instructions, job: bytes = b"") -> IO[bytes]:
    """Instructions in a file that every rank can read by its own descriptor."""
    file = nameless_file()
    pickle.dump(instructions, file)
    file.write(job)
    file.flush()
    return file


def pack(kind: bytes, payload: bytes = b"") -> list[bytes]:
    """A message of a rank, in two parts so that a large payload is not copied."""
    return [_HEAD.pack(kind, len(payload)), payload]


def unpack(data: bytearray) -> tuple[bytes, bytearray] | None:
    """Take the first message off `data`, if all of it is there."""
    if len(data) < _HEAD.size:
        return None
    kind, length = _HEAD.unpack_from(data)
    end = _HEAD.size + length
    if len(data) < end:
        return None
    payload = data[_HEAD.size : end]
    del data[:end]
    return kind, payload


def dumps(value: Any) -> bytes:
    """Like `cloudpickle.dumps`, which pickles modules by name, except modules of a custom class,
    such as `torch.ops`, and their contents. This pickles all of them by name."""
    import io
    import pkgutil

    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, value: Any) -> Any:
            name = ""
            if isinstance(value, types.ModuleType) and type(value) is not types.ModuleType:
                name = value.__name__
            elif type(value).__module__ == "torch._ops":
                name = f"torch.ops.{value}"  # "aten.add", "aten.add.Tensor"
            with contextlib.suppress(ImportError, AttributeError, ValueError):
                if name and pkgutil.resolve_name(name) is value:
                    return pkgutil.resolve_name, (name,)
            return super().reducer_override(value)

    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()
