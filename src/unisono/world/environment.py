"""Which rank of how many this process is, as its launcher set it in the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class RankInfo:
    """Which rank of how many a process is. `local_size` is the number of ranks on its machine, 0 if
    unknown; `job` names the program on this machine, "" if unknown."""

    rank: int
    size: int
    local_rank: int = 0
    local_size: int = 0
    launcher: str = ""
    job: str = ""


@dataclass(frozen=True)
class _Launcher:
    """Names of variables; the first one that is set counts."""

    name: str
    rank: str
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...] = ()
    job: tuple[str, ...] = ()


# mpirun comes before srun: inside a Slurm allocation both set their variables.
_LAUNCHERS = (
    _Launcher("unisono", "UNISONO_RANK", ("UNISONO_SIZE",), ("UNISONO_RANK",), ("UNISONO_SIZE",)),
    _Launcher("torchrun", "RANK", ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",)),
    _Launcher(
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    _Launcher("mpirun", "PMI_RANK", ("PMI_SIZE",), ("MPI_LOCALRANKID",), ("MPI_LOCALNRANKS",)),
    _Launcher(
        "srun",
        "SLURM_PROCID",
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        ("SLURM_LOCALID",),
        (),
        ("SLURM_JOB_ID",),
    ),
)


def read_rank_info(environment: Mapping[str, str] = os.environ) -> RankInfo | None:
    """Which rank of how many this process is; None without a launcher."""
    for launcher in _LAUNCHERS:
        size = _first(environment, launcher.size)
        if launcher.rank in environment and size:
            rank = _number(environment, launcher.rank)
            return RankInfo(
                rank,
                _number(environment, size),
                _number(environment, _first(environment, launcher.local_rank), rank),
                _local_size(environment, launcher, _number(environment, size)),
                launcher.name,
                _job(environment, launcher),
            )
    return None


def read_size(environment: Mapping[str, str] = os.environ) -> int:
    """How many ranks were started, even if this process's own rank is unknown."""
    info = read_rank_info(environment)
    if info is not None:
        return info.size
    return _number(environment, _first(environment, ("WORLD_SIZE",)), 1)


def read_local_rank(environment: Mapping[str, str] = os.environ) -> int:
    if "LOCAL_RANK" in environment:
        return _number(environment, "LOCAL_RANK")
    info = read_rank_info(environment)
    return 0 if info is None else info.local_rank


def find_master(environment: Mapping[str, str] = os.environ) -> tuple[str, str] | None:
    """The address and port for a torch store: MASTER_ADDR and MASTER_PORT. Under srun on several
    nodes the defaults are the first node of the step, which has rank 0, and a port derived from the
    job and step numbers. None if unknown."""
    address, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    info = read_rank_info(environment)
    if info is not None and info.launcher == "srun" and not info.local_size:
        # A batch script is not a rank of a step and has no such list.
        address = address or first_node(environment.get("SLURM_STEP_NODELIST", ""))
        job = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_STEP_ID", "0")
        if not port and all(number.isdecimal() for number in job):
            port = str(_PORTS.start + (int(job[0]) * 7 + int(job[1])) % len(_PORTS))
    return (address, port) if address and port else None


_PORTS = range(15_000, 30_000)
"""Below the range of ephemeral ports."""


def first_node(nodes: str) -> str:
    """The first node of a Slurm list: "node07" of "node[07-09,12],login1"."""
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first)


def _first(environment: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((name for name in names if name in environment), "")


def _number(environment: Mapping[str, str], name: str, otherwise: int = 0) -> int:
    if not name:
        return otherwise
    try:
        return int(environment[name])
    except ValueError:
        raise ValueError(f"{name} is {environment[name]!r}, which is not a number") from None


def _local_size(environment: Mapping[str, str], launcher: _Launcher, size: int) -> int:
    if launcher.name == "srun":  # it says how many machines there are
        nodes = _first(environment, ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"))
        return size if _number(environment, nodes, 1) == 1 else 0
    return _number(environment, _first(environment, launcher.local_size))


def _job(environment: Mapping[str, str], launcher: _Launcher) -> str:
    name = _first(environment, launcher.job)
    if not name:
        return ""
    step = environment.get("SLURM_STEP_ID", "") if launcher.name == "srun" else ""
    return f"{launcher.name}-{environment[name]}-{step}"
