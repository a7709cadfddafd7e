"""Every UNISONO_ variable: what it means, and how the program and the doctor parse it."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")

_log = logging.getLogger("unisono")


class Variable(Generic[Value]):
    """`parse` turns a text into the value, or raises ValueError with what it must be instead.
    The text of a secret variable is never shown."""

    def __init__(
        self, name: str, meaning: str, parse: Callable[[str], Value], is_secret: bool = False
    ) -> None:
        # no dataclass: making one adds a millisecond to every `import torch`
        self.name = name
        self.meaning = meaning
        self.parse = parse
        self.is_secret = is_secret

    def read(self, environment: Mapping[str, str] | None = None) -> Value | None:
        """The value; None if the variable is not set, or empty.

        Raises UnisonoError, in one sentence, if its text is invalid.
        """
        try:
            return self._read(os.environ if environment is None else environment)
        except ValueError as error:
            from unisono.errors import UnisonoError  # would slow down every `import torch` above

            raise UnisonoError(str(error)) from None

    def read_or_warn(self) -> Value | None:
        """The same where nothing must fail: an invalid text counts as not set, and the logger
        "unisono" warns once."""
        try:
            return self._read(os.environ)
        except ValueError as error:
            _warn_once(f"{error}: it is ignored")
            return None

    def _read(self, environment: Mapping[str, str]) -> Value | None:
        text = environment.get(self.name, "")
        if not text:
            return None
        try:
            return self.parse(text)
        except ValueError as error:
            shown = "" if self.is_secret else f", not {text!r}"
            raise ValueError(f"{self.name} {error}{shown}") from None

    def problem(self, text: str) -> str:
        """What an invalid text must be instead ("must be 0 or 1"); "" for a valid one."""
        try:
            self.parse(text)
        except ValueError as error:
            return str(error)
        return ""


@functools.cache
def _warn_once(text: str) -> None:
    _log.warning("%s", text)


def mention_misspelt() -> None:
    """Warn once about variables that are probably misspelt, and about an invalid UNISONO_WATCH,
    which only a program that imports torch would read."""
    WATCH.read_or_warn()
    _mention_misspelt(tuple(name for name in os.environ if name.startswith("UNISONO_")))


@functools.cache
def _mention_misspelt(names: tuple[str, ...]) -> None:
    known = [each.name for each in globals().values() if isinstance(each, Variable)]
    for name in names:
        if name not in known:
            from difflib import get_close_matches

            for likely in get_close_matches(name, known, 1, cutoff=0.85):
                meant = f"(did you mean {likely}?): it is ignored"
                _warn_once(f"{name} is not a variable of unisono {meant}")


def mention_nccl_algo() -> None:
    """Warn once, if NCCL_ALGO is set, that it has no effect on unisono's own groups."""
    if algorithms := os.environ.get("NCCL_ALGO"):
        _warn_once(f"NCCL_ALGO={algorithms} is for NCCL: UNISONO_ALGO chooses here")


# -- parsing -----------------------------------------------------------------------------------


def _whole(least: int, of_what: str) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.strip().isdecimal() or not least <= int(text) < 2**63:
            raise ValueError(f"must be {of_what}, a whole number of at least {least}")
        return int(text)

    return parse


def _patience(text: str) -> int:
    if not text.strip().isdecimal() or not 1 <= int(text) <= 86_400:
        raise ValueError("must be a whole number of seconds from 1 to 86400")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:  # nor NaN
        raise ValueError("must be a number of seconds above 0")
    return seconds


_SWITCH = {"1": True, "true": True, "yes": True, "on": True}
_SWITCH |= {"0": False, "false": False, "no": False, "off": False}


def _switch(text: str) -> bool:
    if text.lower() not in _SWITCH:
        raise ValueError("must be 0 or 1")
    return _SWITCH[text.lower()]


def _name(text: str) -> str:
    if not text.strip().isidentifier():
        raise ValueError("must be a name")
    return text.strip().lower()


def _label(text: str) -> str:
    if not text.strip().isprintable() or not text.strip() or len(text) > 100:
        raise ValueError("must be a name of at most 100 characters")
    return text.strip()


def _secret(text: str) -> bytes:
    """Short ones can be guessed."""
    if len(text) < 16:
        raise ValueError("must have 16 characters or more: try `openssl rand -hex 32`")
    return text.encode()


def _secret_file(path: str) -> bytes:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status, text = os.fstat(file.fileno()), file.read(4096)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ValueError(f"must be a file with a secret, but there is {reason}") from None
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ValueError("must be this user's own file, which nobody else can read (chmod 600)")
    try:
        return _secret(text.decode().strip())
    except ValueError as error:
        raise ValueError(f"must be a file with a secret, which {error}") from None


def _rendezvous(text: str) -> int | str:
    """An inherited descriptor, or a path."""
    if not text.startswith("fd:"):
        return text
    if not text[3:].isdecimal():
        raise ValueError("must be a path, or fd:N for a descriptor")
    return int(text[3:])


def _folder(text: str) -> str:
    """Absolute, since the program may change its working directory."""
    if os.path.exists(text) and not os.path.isdir(text):
        raise ValueError("must be a folder, or a path for a new one")
    return os.path.abspath(text)


def _existing(text: str) -> str:
    if not os.path.isfile(text) and not os.path.isdir(text):
        raise ValueError("must be the path of a libucp.so, or of a folder that has one")
    return os.path.abspath(text)


# -- the table -----------------------------------------------------------------------------------


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.strip().lower() not in words:
            raise ValueError(f"must be {' or '.join(words)}")
        return text.strip().lower()

    return parse


RANK = Variable(
    "UNISONO_RANK",
    "this process's rank; set by unisono.launch and unisono run",
    _whole(0, "a rank"),
)
SIZE = Variable("UNISONO_SIZE", "the number of ranks; set with UNISONO_RANK", _whole(1, "how many"))
RENDEZVOUS = Variable(
    "UNISONO_RENDEZVOUS", "where the ranks meet: a path, or fd:N for a descriptor", _rendezvous
)
BACKEND = Variable(
    "UNISONO_BACKEND", "the backend of init() and init_process_group() if none is named", _name
)
HOSTID = Variable(
    "UNISONO_HOSTID",
    "this rank's host: ranks with the same text share memory; overrides what the system reports",
    _label,
)
HOSTS = Variable(
    "UNISONO_HOSTS",
    "what carries data between hosts: ucx, or gloo, which guarantees less (hosts.md)",
    _one_of("ucx", "gloo"),
)
LINK_PATIENCE_S = Variable(
    "UNISONO_LINK_PATIENCE_S",
    "how many seconds a link between hosts may be down; default 4",
    _patience,
)
JOB_SECRET = Variable(
    "UNISONO_JOB_SECRET",
    "a secret that all ranks of a job know: a process without it cannot join",
    _secret,
    is_secret=True,
)
JOB_SECRET_FILE = Variable(
    "UNISONO_JOB_SECRET_FILE",
    "a file with that secret, which only this user can read: unisono secret FILE makes one",
    _secret_file,
)
REQUIRE_SECRET = Variable(
    "UNISONO_REQUIRE_SECRET",
    "1: ranks that have no such secret do not meet in a torch Store",
    _switch,
)
UCX = Variable(
    "UNISONO_UCX",
    "the UCX that carries data between hosts: its libucp.so, or the folder that contains it",
    _existing,
)
REPLACE = Variable(
    "UNISONO_REPLACE",
    "gloo: programs that ask torch for gloo by name get unisono",
    _one_of("gloo"),
)
VLLM = Variable(
    "UNISONO_VLLM",
    "1: the workers of a vLLM on CPUs talk to each other by unisono (docs/serving.md)",
    _switch,
)
ALGO = Variable(
    "UNISONO_ALGO",
    "the default algorithm of all_reduce, from unisono plan's catalog (case-insensitive)",
    str.strip,
)
EAGER_SEND = Variable(
    "UNISONO_EAGER_SEND",
    "sends of at most this many bytes return before they are matched, as gloo's do",
    _whole(0, "a number of bytes"),
)
READ_PEERS = Variable(
    "UNISONO_READ_PEERS",
    "0: large tensors go through shared memory, not through the kernel's process-to-process copy",
    _switch,
)
COPY_THREADS = Variable(
    "UNISONO_COPY_THREADS",
    "threads of a rank that share a call on 1 MiB or more (1 to 4; default: half of its cores)",
    _whole(1, "a number of threads"),
)
SPIN = Variable(
    "UNISONO_SPIN_US",
    "microseconds that a waiting rank may spin before it sleeps (default: 200), given enough cores",
    _whole(0, "microseconds"),
)
SITES = Variable(
    "UNISONO_SITES",
    "1: every call notes its source line, blocking ones too (0.1 to 0.2 us)",
    _switch,
)
CHECK = Variable(
    "UNISONO_CHECK",
    "0: calls on gloo and mpi begin without comparing the ranks' calls",
    _switch,
)
REPRODUCIBLE = Variable(
    "UNISONO_REPRODUCIBLE",
    "1: reductions give the same bits for any number of ranks and any placement (docs/numbers.md)",
    _switch,
)
CHECK_SHAPES = Variable(
    "UNISONO_CHECK_SHAPES",
    "1: the ranks' shapes are compared, too; 0: never, not even under the watch or in tests",
    _switch,
)
TRACEBACK = Variable(
    "UNISONO_TRACEBACK",
    "full: tracebacks of unisono's errors show its own frames, too",
    _one_of("full"),
)
WATCH = Variable(
    "UNISONO_WATCH",
    "1: the watch starts with the rank, or with import torch",
    _switch,
)
WATCH_HANG_S = Variable(
    "UNISONO_WATCH_HANG_S", "after how many seconds a waiting call is reported", _seconds
)
WATCH_CHECK = Variable(
    "UNISONO_WATCH_CHECK",
    "1: calls of watched groups are compared before data moves",
    _switch,
)
SANITIZE = Variable(
    "UNISONO_SANITIZE",
    "1: the sanitizer, which finds what makes numbers wrong, starts with the watch",
    _switch,
)
PROFILE = Variable(
    "UNISONO_PROFILE",
    "1: the watch notes waits and steps, for the profile that unisono run --profile makes",
    _switch,
)
WATCH_FOLDER = Variable(
    "UNISONO_WATCH_FOLDER", "where every watched process saves its reports, as JSON", _folder
)
RECORD_KEEPER = Variable(
    "UNISONO_RECORD_KEEPER",
    "a watched rank of unisono run: its connection to the launcher",
    _whole(0, "a descriptor"),
)
TERMINAL = Variable(
    "UNISONO_TERMINAL", "1, a rank of unisono run: a terminal shows what it writes", _switch
)
TEST_CHANNEL = Variable(
    "UNISONO_TEST_CHANNEL", "a rank of the pytest plugin: its socket", _whole(0, "a descriptor")
)

ALL: tuple[Variable[Any], ...] = tuple(
    value for value in globals().values() if isinstance(value, Variable)
)
"""In the order of their definitions above."""


def watch_is_wanted() -> bool:
    """Whether the environment asks for the watch, or for what needs it."""
    return any(variable.read_or_warn() for variable in (WATCH, SANITIZE, PROFILE))


def job_secret() -> bytes:
    """What the ranks of this job know and no other process; b"" if there is nothing. Raises
    UnisonoError."""
    secret = JOB_SECRET.read() or JOB_SECRET_FILE.read() or b""
    if REQUIRE_SECRET.read() and not secret:
        from unisono.errors import UnisonoError

        raise UnisonoError(
            "UNISONO_REQUIRE_SECRET is set, and this rank has no secret: `unisono secret FILE` "
            "makes one, and UNISONO_JOB_SECRET_FILE=FILE, on every rank, uses it"
        )
    return secret
