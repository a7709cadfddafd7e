"""Which UCX carries data between hosts: finding it, loading it, and its settings.

pip's has only TCP; the system's, or a cluster's own, may have RDMA. UCX's own variables (UCX_TLS,
UCX_NET_DEVICES ...) keep their meaning.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from unisono import variables
from unisono.comm import engine
from unisono.comm.meeting.network import find_interface
from unisono.errors import RendezvousError

Version = tuple[int, int, int]

INSTALL = "pip install 'unisono[hosts]'"
OLDEST: Version = (1, 12, 0)

_NAMES = ("libucp.so.0", "libucp.so")
_ADAPTERS = Path("/sys/class/infiniband")
_INTERFACES = Path("/sys/class/net")
_ASK_VERSION = """
import ctypes, sys
numbers = [ctypes.c_uint() for _ in range(3)]
ctypes.CDLL(sys.argv[1]).ucp_get_version(*map(ctypes.byref, numbers))
print(*(number.value for number in numbers))
"""


class Ucx(NamedTuple):
    """A UCX of this host: `path` is its libucp.so, `origin` says in words where it comes from."""

    path: Path
    origin: str

    @property
    def version(self) -> Version:
        """The library's own version. Raises RendezvousError if it cannot be loaded."""
        return _version_of(self.path)

    @property
    def adapters(self) -> tuple[str, ...]:
        """This host's RDMA adapters; none if this UCX was built without RDMA."""
        if not self.is_built_with_rdma or not _ADAPTERS.is_dir():
            return ()
        return tuple(sorted(adapter.name for adapter in _ADAPTERS.iterdir()))

    @property
    def is_built_with_rdma(self) -> bool:
        return any((self.path.parent / "ucx").glob("libuct_ib.so*"))


def find() -> Ucx:
    """The UCX that UNISONO_UCX names; else pip's, or the system's if that alone has RDMA.

    Raises RendezvousError, with the command that installs it, if there is none.
    """
    named = variables.UCX.read()
    if named is not None:
        return _named(Path(named))
    pips, systems = _pips(), _systems()
    found = systems if pips is None or (systems and systems.adapters) else pips
    if found is None:
        raise RendezvousError(
            f"groups over several hosts need UCX, which was not found: run `{INSTALL}` on each, or "
            "set UNISONO_UCX to a libucp.so"
        )
    return found


def load(found: Ucx) -> Version:
    """Load it into this process, and return the version of what is loaded: if another library has
    already loaded a UCX, that one is used.

    Raises RendezvousError if it cannot be loaded, or is too old.
    """
    try:
        version: Version = engine.native.load_ucx(str(found.path))
    except OSError as error:
        raise RendezvousError(
            f"{found.origin}, {found.path}, cannot be loaded ({error}): run `{INSTALL}`, or set "
            "UNISONO_UCX to another libucp.so"
        ) from error
    if version < OLDEST:
        raise RendezvousError(
            f"UCX {format_version(version)} is too old, groups over several hosts need "
            f"{format_version(OLDEST)} or later: run `{INSTALL}`"
        )
    return version


def settings(found: Ucx, address: str) -> list[tuple[str, str]]:
    """This UCX's settings (names without UCX_) for a process that other hosts reach at `address`,
    except those that the user has set in the environment."""
    interface = find_interface(address)
    has_rdma = bool(found.adapters)
    chosen = {
        "TLS": "tcp,self,ib" if has_rdma else "tcp,self",  # the engine handles memory of one host
        "TCP_TX_SEG_SIZE": "256k",
        "TCP_RX_SEG_SIZE": "256k",
        "TCP_CONN_NB": "y",
        # the control lines detect silence
        "KEEPALIVE_INTERVAL": "inf",
        "TCP_KEEPIDLE": "inf",
    }
    if interface and not has_rdma:
        chosen["NET_DEVICES"] = interface
        if (_INTERFACES / interface / "bridge").is_dir():
            chosen["TCP_BRIDGE_ENABLE"] = "y"
    if ":" in address:
        chosen["TCP_AF_PRIO"] = "inet6,inet"
    return [(name, value) for name, value in chosen.items() if f"UCX_{name}" not in os.environ]


def format_version(version: Version) -> str:
    """ "1.22.0" """
    return ".".join(map(str, version))


# -- where to look ---------------------------------------------------------------------------------


def _named(place: Path) -> Ucx:
    path = place if place.is_file() else _look_in(place, place / "lib", place / "lib64")
    if path is None:
        raise RendezvousError(f"UNISONO_UCX is {place}, which has no libucp.so")
    return Ucx(path, "the UCX that UNISONO_UCX names")


def _pips() -> Ucx | None:
    spec = importlib.util.find_spec("libucx")
    if spec is None or spec.origin is None:
        return None
    path = _look_in(Path(spec.origin).parent / "lib")
    return None if path is None else Ucx(path, "pip's UCX")


def _systems() -> Ucx | None:
    path = _look_in(*_system_folders())
    return None if path is None else Ucx(path, "the system's UCX")


def _system_folders() -> Iterator[Path]:
    """In the loader's order."""
    yield from map(Path, filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":")))
    machine = getattr(sys.implementation, "_multiarch", f"{os.uname().machine}-linux-gnu")
    for folder in ("/usr/local/lib", "/usr/local/lib64", "/opt/ucx/lib"):
        yield Path(folder)
    for folder in (f"/usr/lib/{machine}", "/usr/lib64", "/usr/lib"):
        yield Path(folder)


def _look_in(*folders: Path) -> Path | None:
    paths = (folder / name for folder in folders for name in _NAMES)
    return next((path.resolve() for path in paths if path.is_file()), None)


# -- versions --------------------------------------------------------------------------------------


@functools.cache
def _version_of(path: Path) -> Version:
    """pip's records it; another is asked in a separate process, since loading it has side
    effects."""
    note = path.parents[1] / "UCX_WHEEL_VERSION.txt"
    text = note.read_text() if note.is_file() else _ask_version(path)
    major, minor, release = map(int, text.replace(".", " ").split()[:3])
    return major, minor, release


def _ask_version(path: Path) -> str:
    command = [sys.executable, "-I", "-S", "-c", _ASK_VERSION, str(path)]
    asked = subprocess.run(command, capture_output=True, text=True)
    if asked.returncode:
        reason = asked.stderr.strip().rpartition("\n")[2]
        raise RendezvousError(f"{path} cannot be loaded: {reason}")
    return asked.stdout
