"""The board: where processes that meet leave texts for each other. It is a torch Store, or, for
processes of one host, a file.

torch's own wait forever for a host that is stopped or cut off, and retry one that has ended until
their own timeout; a board answers in time, or raises StoreGone. In a job with a secret every text
is sealed together with its name: one that another process has written is refused.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import fcntl
import json
import os
import queue
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from unisono import variables
from unisono.comm.meeting.deadline import JOIN_TIMEOUT_S, Deadline, in_seconds
from unisono.comm.meeting.makings import ASKS_A_STORE
from unisono.comm.meeting.unix_socket import Departed, descriptors_needed
from unisono.errors import RendezvousError

LEADER = "unisono/0"
"""The name under which the rank that leads a meeting announces itself."""
_SEALED = "\x1f"
_GLANCE_S = 0.2
_LOCKED_S = 10.0
_GLANCES = 16
"""Of a file's status, in one pause: they cost less than to read it."""
_SHORTEST_S = 0.0002
_ADVICE = (
    "Set UNISONO_JOB_SECRET to the same text on every rank, or on none; if it already is, a "
    "foreign process has written to the store: keep it where only the job's hosts reach it"
)


class StoreGone(RendezvousError):
    """The torch Store through which ranks meet has ended, or does not answer."""


class Foreign(RendezvousError):
    """A text on a board that a process without the job's secret has written: `text`, by `name`."""

    def __init__(self, name: str, text: str, who: str = "") -> None:
        who = who or f"{name!r} in the torch Store of the meeting and this process"
        super().__init__(f"{who} have different secrets. {_ADVICE}")
        self.name, self.text = name, text


def answer_within(
    limit_s: float, ask: Callable[[], Any], check: Callable[[], None] = lambda: None
) -> Any:
    """What `ask`, a request to a torch Store, returns or raises. Raises StoreGone if it takes
    longer, and what `check` raises, which is called periodically; the request then continues in a
    thread that cannot be ended."""
    answers: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((ask(), None))
        except Exception as error:
            answers.put((None, error))

    threading.Thread(target=run, name=ASKS_A_STORE, daemon=True).start()
    limit = Deadline(max(limit_s, 1.0))  # at least that long: it says which ranks were missing
    while True:
        try:
            answer, error = answers.get(timeout=min(_GLANCE_S, limit.left_s()))
            break
        except queue.Empty:
            check()
            if not limit.left_s():
                raise StoreGone(
                    f"the torch Store of the meeting did not answer within {in_seconds(limit_s)}: "
                    "its process is stopped, or the network to it drops packets (a wrong MTU?)"
                ) from None
    if error is not None:
        raise error
    return answer


class Board:
    """A part of a torch Store, at a `path`. Who meets there waits until a `deadline`, which also
    limits requests, and calls `check` meanwhile, which raises if the others will not come.
    `settles` decides once and for all, for them, whether the group is made, and returns that."""

    is_of_one_host = False
    """Whether only processes of one host can reach it."""
    settles: Callable[[bool], bool | None] | None = None

    def __init__(
        self,
        store: Any,
        deadline: Deadline | None = None,
        check: Callable[[], None] = lambda: None,
        path: str = "",
    ) -> None:
        self.store: Any = store
        self.path = path
        self.deadline = deadline or Deadline(JOIN_TIMEOUT_S)
        self.check = check
        self._secret = b"" if store is None else variables.job_secret()
        self._hides_by = b""

    def part(self, name: str) -> Board:
        made = copy.copy(self)
        made.path += f"{name}/"
        return made

    def until(
        self,
        deadline: Deadline,
        check: Callable[[], None] = lambda: None,
        settles: Callable[[bool], bool | None] | None = None,
    ) -> Board:
        """The same one, with other limits."""
        made = copy.copy(self)
        made.deadline, made.check, made.settles = deadline, check, settles
        return made

    def hidden(self, key: bytes) -> Board:
        """The same one for the ranks that know a key: in a job with a secret, names in the store
        are hashes, which a stranger can neither guess nor use again."""
        made = copy.copy(self)
        made._hides_by = key if self._secret else b""
        return made

    # -- texts -----------------------------------------------------------------------------------

    def set(self, name: str, text: str) -> None:
        key, sealed = self._key(name), self._seal(name, text)
        self._ask(lambda: self.store.set(key, sealed))

    def get(self, name: str) -> str:
        """ "" if there is none. Raises Foreign."""
        key = self._key(name)
        found = self._ask(lambda: self.store.get(key) if self.store.check([key]) else b"")
        return self._open(name, found)

    def get_all(self, names: Sequence[str]) -> list[str]:
        """The texts under all these names; none of them until all are there. Raises Foreign."""
        keys = list(map(self._key, names))
        found = self._ask(lambda: self.store.multi_get(keys) if self.store.check(keys) else [])
        texts = [self._open(name, text) for name, text in zip(names, found, strict=False)]
        return texts if all(texts) else []  # a file may be another one since it was checked

    def has(self, names: Sequence[str]) -> bool:
        keys = list(map(self._key, names))
        return bool(self._ask(lambda: self.store.check(keys)))

    def add(self, name: str, count: int = 1) -> int:
        """Add to a number, which is 0 at first; returns the sum."""
        if not self._secret:
            return int(self._ask(lambda: self.store.add(self._key(name), count)))
        while True:  # each sum is another text, so that only one process can have written it
            told = self.get(name)
            text = f"{int(told.partition(' ')[0] or 0) + count} {os.urandom(8).hex()}"
            if not count or self.compare_set(name, told, text) == text:
                return int(text.partition(" ")[0])

    def compare_set(self, name: str, expected: str, text: str) -> str:
        """Set a text if there is the `expected` one, or none if that is ""; returns the one that is
        there then. Raises Foreign."""
        before = self._seal(name, expected) if expected else ""
        given = self._key(name), before, self._seal(name, text)
        return self._open(name, self._ask(lambda: self.store.compare_set(*given)))

    def sleep(self, pause_s: float) -> bool:
        """Sleep before another look; less, and return True, if it is seen that a text has changed
        since the last sleep."""
        time.sleep(pause_s)
        return False

    def settle(self, name: str, made: bool | None) -> bool | None:
        """Whether something is made, as settled first; with None as far as it is settled."""
        told = self.get(name) if made is None else self.compare_set(name, "", str(int(made)))
        return told == "1" if told else None

    def _ask(self, ask: Callable[[], Any]) -> Any:
        try:
            return answer_within(self.deadline.left_s(), ask, self.check)
        except StoreGone:
            raise
        except RuntimeError as error:  # torch's texts are about sockets
            reason = str(error).partition("\n")[0]
            raise StoreGone(
                "the torch Store of the meeting does not answer; has the process that hosts it "
                f"ended? ({reason})"
            ) from error

    def _key(self, name: str) -> str:
        key = self.path + name
        return _keyed_hash(self._hides_by, key) if self._hides_by else key

    def _seal(self, name: str, text: str) -> str:
        if not self._secret:
            return text
        proof = _keyed_hash(self._secret, f"{self.path}{name}\0{text}")
        return f"{_SEALED}{proof} {text}"

    def _open(self, name: str, found: bytes) -> str:
        told = found.decode(errors="replace")
        if not told or (not self._secret and told[0] != _SEALED):
            return told
        text = told.partition(" ")[2] if told[0] == _SEALED else told
        import hmac

        sealed = self._seal(name, text).encode()
        if not self._secret or not hmac.compare_digest(told.encode(), sealed):
            raise Foreign(name, text)
        return text

    # -- the store below -------------------------------------------------------------------------

    @property
    def host(self) -> str:
        """The host of a TCPStore, also below prefixes; "" for other stores."""
        return str(getattr(self._lowest, "host", ""))

    @property
    def _lowest(self) -> Any:
        store = self.store
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        return store

    def torch_store(self) -> Any:
        """The same part as a torch Store: what torch writes there is not sealed."""
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        return PrefixStore(self.path.rstrip("/"), self.store) if self.path else self.store

    def reopen(self, deadline: Deadline) -> Board:
        """The same one by a separate connection: each handles one request at a time. Raises
        StoreGone if there is none in time, and at once if its host has ended, where torch would
        retry."""
        host, port, limit_s = self.host, getattr(self._lowest, "port", 0), deadline.left_s()

        def call() -> Any:
            if host and port:
                socket.create_connection((host, port), limit_s).close()
            return self.store.clone()

        try:
            made = self.until(deadline)
            made.store = answer_within(limit_s, call)
            return made
        except OSError as error:
            raise StoreGone(
                f"the torch Store at {host}:{port}, through which the ranks met, has ended or "
                f"cannot be reached ({error.strerror or error})"
            ) from error


def _keyed_hash(key: bytes, text: str) -> str:
    import hashlib  # few jobs have a secret
    import hmac

    return hmac.digest(key, text.encode(), hashlib.sha256).hex()


class FileBoard(Board):
    """A board in a file of this user: a path that all ranks know, or a descriptor that all have
    inherited. It begins with the leader's announcement and ends with that: nothing else can be
    written before or after. Files at `others` count if there is nothing in the first."""

    is_of_one_host = True

    def __init__(
        self,
        where: str | os.PathLike[str] | int,
        *others: Path,
        deadline: Deadline | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(None, deadline, check)
        self.store = _TextFile(where, others)

    def get(self, name: str) -> str:
        return str(self.store.get(self._key(name)).decode())

    def sleep(self, pause_s: float) -> bool:
        return bool(self.store.sleep(pause_s))

    def _ask(self, ask: Callable[[], Any]) -> Any:
        return ask()


class _TextFile:
    """Texts by name in a file, with the methods of a torch Store that a board needs. The first line
    is the leader's announcement, the rest a JSON object with all others."""

    def __init__(self, where: str | os.PathLike[str] | int, others: Sequence[Path]) -> None:
        self._where, self._others = where, others
        self._seen: list[object] = []

    def sleep(self, pause_s: float) -> bool:
        limit = Deadline(pause_s)
        while limit.left_s():
            time.sleep(max(pause_s / _GLANCES, _SHORTEST_S))
            before, self._seen = self._seen, [_trace(at) for at in (self._where, *self._others)]
            if self._seen != before:
                return True
        return False

    def set(self, key: str, text: str) -> None:
        if key != LEADER:
            with self._texts(to_change=True) as texts:
                texts[key] = text
        elif isinstance(self._where, int):
            os.ftruncate(self._where, 0)
            os.pwrite(self._where, text.encode(), 0)
        elif text:
            _replace(Path(self._where), text)
        else:
            for path in (self._where, *self._others):
                Path(path).unlink(missing_ok=True)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def check(self, keys: Sequence[str]) -> bool:
        return all(self.multi_get(keys))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        with self._texts() as texts:
            return [texts.get(key, "").encode() for key in keys]

    def add(self, key: str, count: int) -> int:
        with self._texts(to_change=True) as texts:
            texts[key] = str(int(texts.get(key, 0)) + count)
            return int(texts[key])

    def compare_set(self, key: str, expected: str, text: str) -> bytes:
        with self._texts(to_change=True) as texts:
            if texts.get(key, "") == expected:
                texts[key] = text
            return texts.get(key, "").encode()

    @contextlib.contextmanager
    def _texts(self, to_change: bool = False) -> Iterator[dict[str, str]]:
        """What is there, locked meanwhile; what the caller changes is written. Raises Departed if
        there is nothing to change."""
        with contextlib.ExitStack() as stack:
            announcement = rest = ""
            for path in (self._where, *self._others):
                with contextlib.suppress(*(() if path is self._where else (RendezvousError,))):
                    opened = _open_own(path, os.O_RDWR if to_change else os.O_RDONLY)
                    if opened is None:
                        continue
                    descriptor = opened
                    stack.callback(os.close, descriptor)
                    _lock(descriptor, fcntl.LOCK_EX if to_change else fcntl.LOCK_SH)
                    found = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
                    announcement, _, rest = found.decode(errors="replace").partition("\n")
                if announcement:
                    break
            if to_change and not announcement:
                raise Departed(f"the meeting at {self._where} is over")
            texts = {LEADER: announcement}
            with contextlib.suppress(ValueError):  # its writer was killed
                texts |= json.loads(rest or "{}")
            yield texts
            if to_change:
                del texts[LEADER]
                changed = f"{announcement}\n{json.dumps(texts)}".encode()
                os.pwrite(descriptor, changed, 0)
                os.ftruncate(descriptor, len(changed))


def _trace(path: str | os.PathLike[str] | int) -> object:
    """What differs once a file has changed, or another is there."""
    with contextlib.suppress(OSError):
        status = os.stat(path)
        return status.st_ino, status.st_size, status.st_mtime_ns
    return None


def _lock(descriptor: int, how: int) -> None:
    """Lock a file, unless its file system has no locks: there nobody but the leader writes."""
    limit = Deadline(_LOCKED_S)
    while True:
        try:
            fcntl.flock(descriptor, how | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if not limit.left_s():
                raise RendezvousError(
                    f"a process has locked a rendezvous file for {in_seconds(_LOCKED_S)}: is it "
                    "stopped?"
                ) from error
            time.sleep(0.0001)
        except OSError:
            return
        else:
            return


def _replace(path: Path, text: str) -> None:
    """Write a file of this user, as a whole."""
    draft = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    try:
        descriptor = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.replace(draft, path)
    except BaseException as error:
        draft.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        raise RendezvousError(
            f"cannot write the rendezvous file {path}: {error.strerror}; it must be a file "
            f"of user {os.geteuid()}"
        ) from error


def _open_own(path: str | os.PathLike[str] | int, how: int) -> int | None:
    """Open a file of this user; None if there is none."""
    if isinstance(path, int):  # a duplicate would share its locks with all that inherited it
        path = f"/proc/self/fd/{path}"
    try:  # without waiting: it may be a FIFO without a writer
        with descriptors_needed():
            descriptor = os.open(path, how | os.O_NONBLOCK | os.O_CLOEXEC)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            os.close(descriptor)
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        return descriptor
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RendezvousError(
            f"the rendezvous file {path} cannot be read: {error.strerror}; it must be a file of "
            f"user {os.geteuid()}"
        ) from error
