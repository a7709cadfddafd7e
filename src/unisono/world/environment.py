"""Which rank of how many this process is, as whoever started it has said in the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class RankInfo:
    """Which rank of how many a process is. `local_size` is how many of them its machine has, 0
    where nobody said; `job` names the program on this machine, "" where nobody did."""

    rank: int
    size: int
    local_rank: int = 0
    local_size: int = 0
    launcher: str = ""
    job: str = ""


@dataclass(frozen=True)
class _Launcher:
    """Names of variables; of several the first that is set counts."""

    name: str
    rank: str
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...] = ()
    job: tuple[str, ...] = ()


# mpirun stands before srun: inside an allocation of Slurm both have set theirs.
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
    """Which rank of how many this process is; None where nobody has started several."""
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
    """How many ranks this process was started as one of, even where nobody says which."""
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
    """The address and port for a torch store: MASTER_ADDR and MASTER_PORT. Where srun has started
    the ranks on several nodes, what is not set of them is the first node of the step, which has
    rank 0, and a port that follows from the numbers of job and step. None where nobody says."""
    address, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    info = read_rank_info(environment)
    if info is not None and info.launcher == "srun" and not info.local_size:
        # A batch script, which is no rank of a step, has no such list.
        address = address or first_node(environment.get("SLURM_STEP_NODELIST", ""))
        job = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_STEP_ID", "0")
        if not port and all(number.isdecimal() for number in job):
            port = str(_PORTS.start + (int(job[0]) * 7 + int(job[1])) % len(_PORTS))
    return (address, port) if address and port else None


_PORTS = range(15_000, 30_000)
"""Below those that kernels give away."""


def first_node(nodes: str) -> str:
    """The first of a list as Slurm writes it: "node07" of "node[07-09,12],login1"."""
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
