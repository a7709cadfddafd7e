"""Programs as users start them: torchrun on each host, DDP, FSDP2, GradientSync, unisono.init."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from namespaces import MakeNetwork, Network, start_ranks, start_torchrun

from user_programs import WriteProgram, eventually, plain_environment

pytestmark = pytest.mark.slow

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}

TRAIN = """
    import torch, torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel
    import unisono
    from unisono.training import GradientSync

    dist.init_process_group("unisono")
    rank, size = dist.get_rank(), dist.get_world_size()

    def make():
        torch.manual_seed(0)
        return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))

    def data(of):
        torch.manual_seed(100 + of)
        return torch.randn(8, 64)

    def train(model, batch, sync=None):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            if sync is not None:
                sync.finish()
            optimizer.step()

    alone = make()
    train(alone, torch.cat([data(of) for of in range(size)]))
    expected = [p.detach() for p in alone.parameters()]

    ddp = DistributedDataParallel(make(), bucket_cap_mb=0.01)
    train(ddp, data(rank))
    for mine, right in zip(ddp.parameters(), expected):
        torch.testing.assert_close(mine.detach(), right, rtol=1e-4, atol=1e-6)

    sharded = make()
    for layer in sharded:
        fully_shard(layer)
    fully_shard(sharded)
    train(sharded, data(rank))
    for mine, right in zip(sharded.parameters(), expected):
        torch.testing.assert_close(mine.full_tensor().detach(), right, rtol=1e-4, atol=1e-6)

    from torch.distributed.device_mesh import init_device_mesh
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
    t = torch.tensor([float(rank)])
    dist.all_reduce(t, group=mesh["dp"].get_group())
    assert t.item() == sum(mesh["dp"].mesh.tolist()), t
    print(f"rank {rank} of {size} has trained", flush=True)
    dist.destroy_process_group()
"""


def test_training_under_torchrun(two_hosts: Network, program: WriteProgram, tmp_path: Path) -> None:
    script = program(TRAIN)
    environment = plain_environment() | ENVIRONMENT
    nodes = start_torchrun(two_hosts.hosts, (2, 2), [str(script.path)], tmp_path, environment)
    for node in nodes:
        assert node.wait(300) == 0, node.text()
    text = nodes[0].text() + nodes[1].text()
    assert all(f"rank {rank} of 4 has trained" in text for rank in range(4))


INIT = """
    import sys, torch, unisono
    comm = unisono.init()
    x = torch.ones(3)
    comm.all_reduce(x)
    assert x.eq(comm.size).all()
    print(comm.backend, unisono.get_backend_reason(), flush=True)
    manager = unisono.ProcessGroupManager(tp_size=2, dp_size=comm.size // 2)
    unisono.shutdown()
"""


def test_auto_takes_unisono_over_hosts(
    two_hosts: Network, program: WriteProgram, tmp_path: Path
) -> None:
    script = program(INIT)
    command = [sys.executable, str(script.path)]
    environment = plain_environment() | ENVIRONMENT
    ranks = start_ranks(two_hosts.hosts, (0, 1, 1, 0), command, tmp_path, environment)
    for rank in ranks:
        assert rank.wait() == 0, rank.text()
        assert "unisono no rank has a GPU: shared memory inside 2 hosts, UCX" in rank.text()


FAIL = """
    import os, time, torch, torch.distributed as dist
    dist.init_process_group("unisono")
    rank = dist.get_rank()
    dist.barrier()
    print("pid", os.getpid(), flush=True)
    while True:
        dist.all_reduce(torch.ones(1000))
"""


def test_a_program_without_try_ends_on_all_hosts(
    make_network: MakeNetwork, program: WriteProgram, tmp_path: Path
) -> None:
    """A rank is killed; torchrun on the other host ends too, with our exception in its output."""
    script = program(FAIL)
    environment = plain_environment() | ENVIRONMENT
    with make_network(2) as made:
        nodes = start_torchrun(made.hosts, (2, 2), [str(script.path)], tmp_path, environment)
        assert eventually(lambda: all(node.text().count("pid") == 2 for node in nodes), 120), [
            node.text() for node in nodes
        ]
        victim = int(nodes[1].text().split("pid")[1].split()[0])
        made.hosts[1].send_signal(victim, signal.SIGKILL)
        assert nodes[1].wait(60) != 0
        assert nodes[0].wait(60) != 0
        text = nodes[0].text()
        assert "unisono.errors.PeerLost" in text
        assert f"(pid {victim} on host1)" in text
        left = made.hosts[0].run("ps", "-eo", "comm")
        assert "python" not in left


def test_ctrl_c_on_one_host_ends_both(
    make_network: MakeNetwork, program: WriteProgram, tmp_path: Path
) -> None:
    script = program(FAIL)
    environment = plain_environment() | ENVIRONMENT
    with make_network(2) as made:
        nodes = start_torchrun(made.hosts, (2, 2), [str(script.path)], tmp_path, environment)
        assert eventually(lambda: all(node.text().count("pid") == 2 for node in nodes), 120)
        nodes[1].send_signal(signal.SIGINT)
        for node in nodes:
            assert node.wait(60) != 0
        assert all("python" not in host.run("ps", "-eo", "comm") for host in made.hosts)
