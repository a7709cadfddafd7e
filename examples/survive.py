"""Training that survives: ranks are killed while it runs, the others go on, new ones join.

python examples/survive.py --kills 10 --every 2

This process starts four ranks and kills one of them every now and then, at any moment, and says so.
The survivors go on without it for a few steps, then let a new process join, which takes the dead
one's rank and state. A step has 16 micro-batches, whoever is left to compute them, so its bits do
not depend on that. At the end one process computes every step again: each loss, and the hash of
each step's parameters and optimizer state, must be the same.

On two hosts, each of which has two of the ranks and kills its own:

python examples/survive.py --host 0 --store node0:29500 --folder /a/folder/of/both
python examples/survive.py --host 1 --store node0:29500 --folder /a/folder/of/both

The first hosts the store in which the ranks agree, and so outlives them all.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BEGAN = time.monotonic()
if __name__ == "__main__" and "--rank" not in sys.argv:
    print("  0.0 s  loading torch", flush=True)

import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from unisono import Communicator, GroupError, RendezvousError
from unisono.training import catch_up

RANKS, HOSTS = 4, 2
CONTRIBUTIONS = 16  # micro-batches in a step, shared out over the ranks
STEPS_WITHOUT = 5  # of a smaller group before it lets new ranks join
STEP_S = 0.01  # the rest of a step: this model is a small one


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    return model, torch.optim.AdamW(model.parameters(), 0.01)


def compute(model: nn.Module, step: int, number: int) -> list[torch.Tensor]:
    """The gradients of one micro-batch of a step, and its loss."""
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * step + number))
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return [*gradients, loss.detach().reshape(1)]


def do_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int, comm: Communicator, ends: float
) -> tuple[float, float]:
    """The step's loss, and the average of the ranks' `ends`. If it raises, nothing has changed."""
    first, last = (CONTRIBUTIONS * rank // comm.size for rank in (comm.rank, comm.rank + 1))
    mine = [[*compute(model, step, number), torch.tensor([ends])] for number in range(first, last)]
    means = [torch.empty_like(tensor) for tensor in mine[0]]
    comm.all_reduce(means, "avg", contributions=mine)
    *gradients, loss, ended = means
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()
    return loss.item(), ended.item()


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """A hash of what a checkpoint would hold."""
    states = optimizer.state_dict()["state"].values()
    tensors = [*model.state_dict().values(), *(t for state in states for t in state.values())]
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()


def train(comm: Communicator, name: str, folder: Path, store: Any) -> None:
    """Run one rank until every host has a file "end"."""
    model, optimizer = make()
    step, done_in_group, behind = 0, 0, True
    with log_in(folder, os.getpid()).open("w") as log:
        while True:
            try:
                if comm.size < RANKS and done_in_group == STEPS_WITHOUT:
                    comm = comm.grow(name, RANKS - comm.size, store=store)
                    done_in_group, behind = 0, True
                if behind:  # a new rank, or a survivor whose last step failed but others' did not
                    step, behind = catch_up(model, optimizer, step=step, group=comm), False
                ends = float(all(end.exists() for end in ends_in(folder, store)))
                loss, ended = do_step(model, optimizer, step, comm, ends)
                print(step, comm.size, loss, digest(model, optimizer), file=log, flush=True)
                time.sleep(STEP_S)
                step, done_in_group = step + 1, done_in_group + 1
                if ended:
                    break
            except GroupError:  # a rank has died, here or in any step of it
                comm, done_in_group, behind = comm.shrink(store=store), 0, True
            except RendezvousError:  # a new rank died while joining: there will be another
                continue
    comm.close()


def compute_again(steps: int, name: str) -> list[tuple[str, str]]:
    """The loss and the digest of each step, in one process."""
    model, optimizer = make()
    with Communicator.join(name, 0, 1) as comm:
        return [
            (str(do_step(model, optimizer, step, comm, 0.0)[0]), digest(model, optimizer))
            for step in range(steps)
        ]


def log_in(folder: Path, pid: int) -> Path:
    return folder / f"log-{socket.gethostname()}-{pid}"


def ends_in(folder: Path, store: Any) -> list[Path]:
    """The files with which a host says that it has killed enough."""
    return [folder / f"end-{host}" for host in range(1 if store is None else HOSTS)]


def open_store(where: str, hosts: bool = False) -> Any:
    address, _, port = where.rpartition(":")
    return TCPStore(address, int(port), None, hosts, wait_for_workers=False) if where else None


def be_a_rank(folder: str, where: str, rank: str, *new: str) -> None:
    torch.set_num_threads(1)
    store = open_store(where)
    comm = Communicator.join(folder, int(rank), None if new else RANKS, store, timeout_s=60)
    train(comm, folder, Path(folder), store)


def start(folder: Path, where: str, rank: int, *new: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, "--rank", str(folder), where, str(rank), *new]
    return subprocess.Popen(command)


def wait_for_steps(ranks: list[subprocess.Popen[bytes]], folder: Path) -> None:
    """Return once every rank has done a step."""
    logs = [log_in(folder, rank.pid) for rank in ranks]
    while not all(log.exists() and log.stat().st_size for log in logs):
        assert all(rank.poll() is None for rank in ranks), "a rank that nobody killed has ended"
        time.sleep(0.01)


def say(what: str) -> None:
    print(f"{time.monotonic() - BEGAN:5.1f} s  {what}", flush=True)


def last_step(folder: Path, rank: subprocess.Popen[bytes]) -> str:
    step, size, loss, _ = log_in(folder, rank.pid).read_text().splitlines()[-1].split()
    return f"step {step} on {size} ranks, loss {float(loss):.5f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--every", type=float, default=0.5, help="seconds")
    parser.add_argument("--seconds", type=float, default=30, help="kill no rank after so many")
    parser.add_argument("--host", type=int, default=0, help="of several: which this one is")
    parser.add_argument("--store", default="", help="of several: ADDRESS:PORT of host 0")
    parser.add_argument("--folder", help="of several: one that all of them see")
    options = parser.parse_args()
    torch.set_num_threads(1)
    store = open_store(options.store, hosts=options.host == 0)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(options.folder or place)
        here = RANKS if store is None else RANKS // HOSTS
        first = options.host * here
        say(f"starting {here} ranks")
        ranks = [start(folder, options.store, first + rank) for rank in range(here)]
        try:
            wait_for_steps(ranks, folder)
            killed = 0
            while killed < options.kills and time.monotonic() - BEGAN < options.seconds:
                time.sleep(options.every * random.uniform(0.5, 1.5))
                victim = random.randrange(here)
                say(f"{last_step(folder, ranks[victim])}: rank {first + victim} is killed")
                ranks[victim].kill()
                ranks[victim].wait()
                ranks[victim] = start(folder, options.store, first + victim, "new")
                wait_for_steps(ranks, folder)
                killed += 1
                say(f"{last_step(folder, ranks[victim])}: a new rank {first + victim} has joined")
            ends_in(folder, store)[options.host].touch()
            codes = [rank.wait() for rank in ranks]
        finally:  # Ctrl-C, say: no rank goes on alone
            for rank in ranks:
                rank.kill()
        assert codes == [0] * here, f"ranks ended with {codes}"
        lines = [line.split() for log in folder.glob("log-*") for line in log.open()]
        count = 1 + max(int(step) for step, *_ in lines)
        say(f"computing the {count} steps again in one process")
        expected = compute_again(count, f"{folder} again {options.host}")
    for step, size, *found in lines:
        right = expected[int(step)]
        assert tuple(found) == right, f"step {step} on {size} ranks: {found}, not {right}"
    smaller = len({step for step, size, *_ in lines if int(size) < RANKS})
    print(f"{killed} ranks killed and replaced here in {count} steps,")
    print(
        f"{smaller} of them with fewer ranks; every loss and checkpoint has the bits of one",
        end=" ",
    )
    print(f"process, from {float(expected[0][0]):.3f} to {float(expected[-1][0]):.5f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        be_a_rank(*sys.argv[2:])
    else:
        main()
