"""MPI through mpi4py, on the memory of the same tensors, and how mpirun starts the ranks."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.bench.backends.base import Backend, Buffers, Call, Case, Unsupported, after_copy
from unisono.errors import UnisonoError

if TYPE_CHECKING:
    import torch

    from unisono.bench.settings import BenchSettings

GRACE_S = 5.0
"""How long mpirun has to end its ranks, once asked to, before it is killed."""

_OPS = {"sum": "SUM", "product": "PROD", "min": "MIN", "max": "MAX"}
_OPS |= {"band": "BAND", "bor": "BOR", "bxor": "BXOR"}


class Mpi(Backend):
    """Upper-case methods of an mpi4py communicator: those that take buffers."""

    name = "mpi"

    def __init__(self, world: Any) -> None:
        from mpi4py import MPI

        self.mpi, self.world = MPI, world
        self.rank, self.size = world.rank, world.size
        self.start_send, self.start_recv = world.Isend, world.Irecv

    def native(self, tensor: torch.Tensor) -> Any:
        if str(tensor.dtype) in ("torch.float16", "torch.bfloat16"):
            raise Unsupported(f"MPI has no {str(tensor.dtype).removeprefix('torch.')}")
        return tensor.numpy()

    def call(self, case: Case, buffers: Buffers, root: int) -> Call:
        world, here = self.world, self.mpi.IN_PLACE
        if not case.collective.sized:
            return partial(world.Barrier)
        is_in_place, is_root = case.placement == "in", self.rank == root
        output, input = self.native(buffers.output), self.native(buffers.input)
        given = here if is_in_place else input
        op = self._op(case) if case.collective.reduces else None
        match case.collective.name:
            case "all_reduce":
                return partial(world.Allreduce, given, output, op)
            case "all_reduce_async":
                start = world.Iallreduce
                return lambda: start(here, output, op).Wait()
            case "gradients":
                arrays = [self.native(tensor) for tensor in buffers.gradients()]
                return partial(self._reduce_together, arrays, op)
            case "reduce":
                sides = (given, output) if is_root else (input, None)
                return partial(world.Reduce, *sides, op, root)
            case "reduce_scatter" if is_in_place:
                raise Unsupported("MPI leaves an in-place result at the front of the buffer")
            case "reduce_scatter":
                return partial(world.Reduce_scatter_block, input, output, op)
            case "broadcast":
                return after_copy(case, buffers, partial(world.Bcast, output, root), is_root)
            case "gather":
                sides = (given, output) if is_root else (input, None)
                return partial(world.Gather, *sides, root)
            case "scatter" if is_root:
                return partial(world.Scatter, input, here if is_in_place else output, root)
            case "scatter":
                return partial(world.Scatter, None, output, root)
            case "all_gather":
                return partial(world.Allgather, given, output)
            case _:  # all_to_all
                return partial(world.Alltoall, given, output)

    def _op(self, case: Case) -> Any:
        if case.op not in _OPS:
            raise Unsupported(f"MPI has no {case.op}")
        return getattr(self.mpi, _OPS[case.op])

    def _reduce_together(self, arrays: list[Any], op: Any) -> None:
        """Every tensor's all_reduce is begun, then all are waited for."""
        start, here = self.world.Iallreduce, self.mpi.IN_PLACE
        self.mpi.Request.Waitall([start(here, array, op) for array in arrays])

    def wait_for(self, handles: Sequence[Any]) -> None:
        if len(handles) == 1:
            handles[0].Wait()
        else:
            self.mpi.Request.Waitall(list(handles))


# -- mpirun ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mpirun:
    """The program that starts ranks, and whether it is Open MPI's."""

    path: str
    is_open_mpi: bool


def find_mpirun() -> Mpirun | None:
    """The mpirun beside this Python, or in PATH, if mpi4py is there to use it."""
    if importlib.util.find_spec("mpi4py") is None:
        return None
    beside = Path(sys.executable).parent / "mpirun"
    path = str(beside) if beside.exists() else shutil.which("mpirun")
    if path is None:
        return None
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    return Mpirun(path, "Open MPI" in said or "prte" in said.lower())


def run_by_mpirun(
    mpirun: Mpirun,
    settings: BenchSettings,
    command: Sequence[str],
    handle_line: Callable[[str], None],
) -> None:
    """Run a command on every rank; each line that they write goes to `handle_line`.

    Raises UnisonoError if they fail.
    """
    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
        # mpirun keeps its session in TMPDIR: what a killed one leaves there goes with ours.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": folder}
        with subprocess.Popen(
            [*_mpirun_command(mpirun, settings.ranks, settings.mpi_spins), *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    handle_line(line.rstrip("\n"))
                status = process.wait()
            finally:
                _end(process)
    if status:
        raise UnisonoError(f"mpirun ended with {status}: what the ranks said stands above")


def _mpirun_command(mpirun: Mpirun, ranks: int, spins: bool) -> list[str]:
    if not mpirun.is_open_mpi:
        return [mpirun.path, "-n", str(ranks)]
    return [
        mpirun.path,
        *(["--allow-run-as-root"] if os.geteuid() == 0 else []),
        # As many slots as ranks, whatever mpirun counts as a core.
        *("--host", f"localhost:{ranks}", "-n", str(ranks)),
        # Where another program takes a core for a moment, a rank that spins keeps it from its peer.
        *("--mca", "mpi_yield_when_idle", str(int(not spins))),
        # A rank bound to one core would share it with its own gloo threads, and would tell any
        # library which looks at its affinity that there is one core for all ranks.
        *("--bind-to", "none"),
    ]


def _end(process: subprocess.Popen[Any]) -> None:
    """The polite way, since mpirun then ends its ranks, and the hard way if it must be."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
