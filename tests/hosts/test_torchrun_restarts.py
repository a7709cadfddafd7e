"""torchrun restarts ranks (--nnodes=1:2, --max-restarts), and they meet in the store of the earlier
attempts, which torchrun does not keep apart."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from namespaces import Host, HostProcess, Network, start_on

from user_programs import WriteProgram, eventually, plain_environment

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}

# A rank that finds no mark dies, and the others end in their own ways.
PROGRAM = """
    import os, pathlib, signal, socket, sys, time
    import torch, torch.distributed as dist, unisono
    victim, mark = int(sys.argv[2]), pathlib.Path(sys.argv[3])
    if sys.argv[1] == "unisono.init()":
        unisono.init("unisono")
    else:
        dist.init_process_group("unisono")
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((1000,), rank + 1.0)
    dist.all_reduce(x)
    pair = dist.new_group([0, size - 1])
    if pair is not dist.GroupMember.NON_GROUP_MEMBER:
        dist.all_reduce(y := torch.ones(1), group=pair)
        assert y.item() == 2
    attempt = "again" if mark.exists() else "first"
    os.write(1, f"{attempt}: rank {rank} of {size} has {x[0].item():g}\\n".encode())
    dist.barrier()
    if attempt == "first":
        if rank == victim:
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            dist.all_reduce(x)
"""


def start(
    hosts: Sequence[Host], number: int, script: Path, *args: str, **variables: str
) -> HostProcess:
    """torchrun for two ranks on one of these hosts."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2"]
    command += ["--nproc-per-node=2", "--max-restarts=3", "--monitor-interval=0.1"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={hosts[0].name}:29400", "--rdzv-id=job"]
    command += ["--rdzv-conf=last_call_timeout=3"]
    command += [f"--local-addr={hosts[number].ipv4}", str(script), *args]
    folder, environment = script.parent, plain_environment() | ENVIRONMENT | variables
    return start_on(hosts[number], command, folder / f"node{number}", environment, folder)


@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.parametrize("way", ["unisono.init()", "init_process_group"])
def test_ranks_of_two_hosts_start_again(
    two_hosts: Network, program: WriteProgram, tmp_path: Path, way: str, victim: int
) -> None:
    script = program(PROGRAM)
    two_hosts.name_hosts(tmp_path)
    args = way, str(victim), str(tmp_path / "mark")
    nodes = [start(two_hosts.hosts, number, script.path, *args) for number in range(2)]
    codes = [node.wait() for node in nodes]
    text = "".join(node.text() for node in nodes)
    assert codes == [0, 0], text
    for rank in range(4):
        assert text.count(f"first: rank {rank} of 4 has 10") == 1, text
        assert text.count(f"again: rank {rank} of 4 has 10") == 1, text


def test_a_host_comes_later(two_hosts: Network, program: WriteProgram, tmp_path: Path) -> None:
    """torchrun does not count this restart, and the world has another size. (Without the variable
    its agents wait forever for what they announced before.)"""
    script = program("""
        import os, pathlib, sys
        import torch, torch.distributed as dist
        dist.init_process_group("unisono")
        x = torch.ones(1000)
        dist.all_reduce(x)
        os.write(1, f"rank {dist.get_rank()} has {x[0].item():g}\\n".encode())
        while dist.get_world_size() < 4:
            dist.all_reduce(x)
    """)
    two_hosts.name_hosts(tmp_path)
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    first = start(two_hosts.hosts, 0, script.path, **own_store)
    assert eventually(lambda: first.text().count("has 2") == 2), first.text()
    nodes = [first, start(two_hosts.hosts, 1, script.path, **own_store)]
    codes = [node.wait() for node in nodes]
    text = "".join(node.text() for node in nodes)
    assert codes == [0, 0], text
    assert all(f"rank {rank} has 4" in text for rank in range(4)), text
