"""Training that survives: ranks are killed while it runs, the others go on, new ones join.

python examples/survive.py --kills 10 --every 2

This process starts four ranks and kills one of them every now and then, at any moment, and says so.
The survivors go on without it for a few steps, then let a new process join, which takes the dead
one's rank and state. At the end one process computes every step again, with the same numbers of
ranks: the losses must be the same.

On two hosts, each of which has two of the ranks and kills its own:

python examples/survive.py --host 0 --store node0:29500 --folder /a/folder/of/both
python examples/survive.py --host 1 --store node0:29500 --folder /a/folder/of/both

The first hosts the store in which the ranks agree, and so outlives them all.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from unisono import Communicator, GroupError, RendezvousError
from unisono.training import catch_up

RANKS, HOSTS = 4, 2
STEPS_WITHOUT = 5  # of a smaller group before it lets new ranks join
STEP_S = 0.01  # the rest of a step: this model is a small one
BEGAN = time.monotonic()


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    return model, torch.optim.AdamW(model.parameters(), 0.01)


def backward(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """This rank's part of a step's batch, and its loss."""
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * step + rank))
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    model.zero_grad()
    loss.backward()
    return loss.detach().reshape(1)


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
                loss = backward(model, step, comm.rank)
                ends = torch.tensor([float(all(end.exists() for end in ends_in(folder, store)))])
                gradients = [parameter.grad for parameter in model.parameters()]
                comm.all_reduce([*gradients, loss, ends], "avg")  # type: ignore[list-item]
                optimizer.step()
                print(step, comm.generation, comm.size, loss.item(), file=log, flush=True)
                time.sleep(STEP_S)
                step, done_in_group = step + 1, done_in_group + 1
                if ends.item():
                    break
            except GroupError:  # a rank has died, here or in any step of it
                comm, done_in_group, behind = comm.shrink(store=store), 0, True
            except RendezvousError:  # a new rank died while joining: there will be another
                continue
    comm.close()


def compute_again(sizes: list[int]) -> list[float]:
    """The losses of the same steps in one process."""
    model, optimizer = make()
    losses = []
    for step, size in enumerate(sizes):
        gradients = [torch.zeros_like(parameter) for parameter in model.parameters()]
        total = torch.zeros(1)
        for rank in range(size):
            total += backward(model, step, rank)
            for gradient, parameter in zip(gradients, model.parameters(), strict=True):
                gradient += parameter.grad
        for gradient, parameter in zip(gradients, model.parameters(), strict=True):
            parameter.grad = gradient / size
        optimizer.step()
        losses.append(total.item() / size)
    return losses


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
    step, _, size, loss = log_in(folder, rank.pid).read_text().splitlines()[-1].split()
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
        steps: dict[int, tuple[int, int, float]] = {}
        for log in folder.glob("log-*"):
            for line in log.read_text().splitlines():
                step, generation, size, loss = line.split()
                known = steps.get(int(step), (-1, 0, 0.0))  # the rank that continued later is right
                steps[int(step)] = max(known, (int(generation), int(size), float(loss)))
    say(f"computing the {len(steps)} steps again in one process")
    found = [steps[step] for step in range(len(steps))]
    expected = compute_again([size for _, size, _ in found])
    for step, ((_, size, loss), right) in enumerate(zip(found, expected, strict=True)):
        is_right = abs(loss - right) <= 1e-4 * abs(right)
        assert is_right, f"step {step} on {size} ranks: {loss}, not {right}"
    smaller = sum(size < RANKS for _, size, _ in found)
    print(f"{killed} ranks killed and replaced here in {len(found)} steps,")
    print(f"{smaller} of them with fewer ranks;", end=" ")
    print(f"every loss is that of one process, from {expected[0]:.3f} to {expected[-1]:.5f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        be_a_rank(*sys.argv[2:])
    else:
        main()
