"""Two replica groups of torchft that average gradients by unisono: one is killed and comes back.

pip install torchft
python examples/replicas.py

This process runs torchft's lighthouse and starts two replicas of one rank each. It kills one of
them; the other goes on alone. The killed one is started again, and torchft gives it the state of
the other. After every step that both have made, their parameters must be the same.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchft import Manager, Optimizer
from torchft.coordination import LighthouseServer
from torchft.process_group import ProcessGroupWrapper

from unisono.torch_backend.groups import connect_group

LIMIT = timedelta(seconds=30)


class ProcessGroupUnisono(ProcessGroupWrapper):
    """torchft calls `_create_pg` whenever replicas come or go."""

    def _create_pg(self, store: Any, rank: int, world_size: int) -> dist.ProcessGroup:
        return connect_group(store, rank, world_size, self._timeout)

    def getBackendName(self) -> str:
        return "torchft-unisono"


def train(name: str, lighthouse: str, folder: Path) -> None:
    """Run one replica until there is a file "end"."""
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    adam = torch.optim.Adam(model.parameters(), 0.01)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["adam"])

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupUnisono(LIMIT),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "adam": adam.state_dict()},
        min_replica_size=1,
        timeout=LIMIT,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=name,
        hostname="localhost",
    )
    optimizer = Optimizer(manager, adam)
    ends = torch.zeros(1)
    with (folder / name).open("a") as log:
        while not ends.item():
            optimizer.zero_grad()  # torchft finds out which replicas are alive
            x = torch.randn(16, 8)
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            ends.fill_((folder / "end").exists())
            for tensor in (*(parameter.grad for parameter in model.parameters()), ends):
                manager.allreduce(
                    tensor
                ).wait()  # the mean; a failed step is not raised but repeated
            step = manager.current_step()
            optimizer.step()
            if manager.current_step() == step:  # not on all replicas: the step is repeated
                ends.zero_()
                continue
            total = sum(parameter.sum().item() for parameter in model.parameters())
            print(step, manager.num_participants(), total, loss.item(), file=log, flush=True)
    manager.shutdown()


def start(name: str, lighthouse: str, folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, name, lighthouse, str(folder)])


def read(log: Path) -> list[tuple[int, int, float, float]]:
    """The steps that a replica has recorded."""
    lines = log.read_text().splitlines() if log.exists() else []
    rows = [line.split() for line in lines]
    return [(int(row[0]), int(row[1]), float(row[2]), float(row[3])) for row in rows]


def wait_for(replicas: list[subprocess.Popen[bytes]], log: Path, size: int, more: int = 3) -> None:
    """Return once a replica has done some more steps with this many participants."""
    done = len(read(log))
    while sum(row[1] == size for row in read(log)[done:]) < more:
        assert all(replica.poll() is None for replica in replicas), "a replica has ended by itself"
        time.sleep(0.05)


def main() -> None:
    lighthouse = LighthouseServer("[::]:0", 1, join_timeout_ms=100, heartbeat_timeout_ms=1000)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        first, second = folder / "first", folder / "second"
        replicas = [start(log.name, lighthouse.address(), folder) for log in (first, second)]
        wait_for(replicas, second, size=2)
        replicas[1].kill()
        replicas[1].wait()
        killed_after = read(second)[-1][0]
        wait_for(replicas[:1], first, size=1)
        replicas[1] = start("second", lighthouse.address(), folder)
        wait_for(replicas, second, size=2)
        (folder / "end").touch()
        assert [replica.wait() for replica in replicas] == [0, 0]
        one, other = ({row[0]: row for row in read(log)} for log in (first, second))
    lighthouse.shutdown()
    shared = [step for step in one if step in other and one[step][1] == 2]
    assert max(shared) > killed_after + 3, "the second replica has not come back"
    for step in shared:
        assert one[step][2] == other[step][2], f"step {step}: the parameters differ"
    alone = sum(row[1] == 1 for row in one.values())
    print(f"{len(one)} steps, {alone} of them by one replica while the other was away;")
    print(f"after {len(shared)} steps that both made, they have the same parameters")


if __name__ == "__main__":
    if sys.argv[1:]:
        train(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    else:
        main()
