"""Where strangers leave word of themselves, so that they can meet: a file or a torch Store."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from pathlib import Path
from typing import Any, Protocol

from unisono.errors import RendezvousError

Word = dict[str, Any]
"""What a rank says of itself: its lobby's address, host, boot, pid."""


class Exchange(Protocol):
    """A place that all ranks of a new group can reach."""

    def announce(self, rank: int, word: Word) -> None:
        """Leave word of this rank."""

    def look_up(self, rank: int) -> Word | None:
        """The word of a rank, if it has left one."""

    def clear(self, rank: int, word: Word | None = None) -> None:
        """Take the word of a rank back; where `word` is given, only if it is still that one."""


class FileExchange:
    """An exchange in a file: a path that all ranks know, or a descriptor that all inherited.

    Only rank 0 leaves word here. A stale file of a dead job does no harm: its lobby is gone.
    """

    def __init__(self, where: str | os.PathLike[str] | int) -> None:
        self._where = where

    def announce(self, rank: int, word: Word) -> None:
        if rank != 0:
            return
        data = json.dumps(word).encode()
        if isinstance(self._where, int):
            os.ftruncate(self._where, 0)
            os.pwrite(self._where, data, 0)
            return
        path = Path(self._where)
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            descriptor = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            os.replace(draft, path)
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise RendezvousError(f"cannot write the rendezvous file {path}: {error}") from error

    def look_up(self, rank: int) -> Word | None:
        if rank != 0:
            return None
        try:
            word = json.loads(self._read())
        except (FileNotFoundError, ValueError):
            return None
        return word if isinstance(word, dict) and "address" in word else None

    def clear(self, rank: int, word: Word | None = None) -> None:
        if rank != 0 or (word is not None and self.look_up(0) != word):
            return
        if isinstance(self._where, int):
            os.ftruncate(self._where, 0)
        else:
            Path(self._where).unlink(missing_ok=True)

    def _read(self) -> bytes:
        if isinstance(self._where, int):
            return os.pread(self._where, 1 << 16, 0)
        try:
            with open(self._where, "rb") as file:
                owner = os.fstat(file.fileno()).st_uid
                data = file.read(1 << 16)
        except PermissionError as error:
            raise RendezvousError(
                f"the rendezvous file {self._where} cannot be read: {error.strerror}; use a path "
                "of your own"
            ) from error
        if owner != os.geteuid():
            raise RendezvousError(
                f"the rendezvous file {self._where} belongs to user {owner}, not to "
                f"{os.geteuid()}: use a path of your own"
            )
        return data


class StoreExchange:
    """An exchange in a torch Store (TCPStore, FileStore, PrefixStore, ...), which belongs to one
    job: nobody else leaves word in it. Meetings in one store are told apart by their `prefix`."""

    def __init__(self, store: Any, prefix: str = "unisono") -> None:
        self._store = store
        self._prefix = prefix

    def announce(self, rank: int, word: Word) -> None:
        self._store.set(f"{self._prefix}/{rank}", json.dumps(word))

    def look_up(self, rank: int) -> Word | None:
        key = f"{self._prefix}/{rank}"
        if not self._store.check([key]):
            return None
        try:
            word = json.loads(self._store.get(key))
        except ValueError:
            return None
        return word if isinstance(word, dict) and "address" in word else None

    def clear(self, rank: int, word: Word | None = None) -> None:
        key = f"{self._prefix}/{rank}"
        with contextlib.suppress(RuntimeError, NotImplementedError):  # not all stores can forget
            if self._store.delete_key(key):
                return
        self._store.set(key, "")
