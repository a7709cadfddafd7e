"""Libraries that train with torch.distributed, on "unisono". Skipped if not installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from user_programs import write_program

pytestmark = pytest.mark.slow

# What one process learns from the whole batches, and a check that the ranks have learned the same.
AROUND = """
import torch
import torch.distributed as dist

torch.manual_seed(0)
DATA = torch.utils.data.TensorDataset(torch.randn(16, 4).double(), torch.randn(16, 1).double())


def make():
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 1).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def check(model):
    alone, optimizer = make()
    inputs, targets = DATA.tensors
    for start in range(0, 16, 8):
        optimizer.zero_grad()
        output = alone(inputs[start : start + 8])
        torch.nn.functional.mse_loss(output, targets[start : start + 8]).backward()
        optimizer.step()
    for mine, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, expected)
    print(f"learned on {dist.get_backend()} {dist.get_world_size()}\\n", end="", flush=True)
"""

ACCELERATE = """
from accelerate import Accelerator

dist.init_process_group("unisono")  # before the Accelerator, which knows gloo and mpi alone
accelerator = Accelerator(cpu=True)
model, optimizer = make()
loader = torch.utils.data.DataLoader(DATA, batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for inputs, targets in loader:
    optimizer.zero_grad()
    accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
    optimizer.step()
everyone = accelerator.gather(torch.tensor([accelerator.process_index]))
assert everyone.tolist() == [0, 1]
check(accelerator.unwrap_model(model))
accelerator.end_training()
"""

FABRIC = """
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy

strategy = DDPStrategy(process_group_backend="unisono")
fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
fabric.launch()
model, optimizer = make()
sampler = torch.utils.data.BatchSampler(range(fabric.global_rank, 16, 2), 4, drop_last=False)
loader = torch.utils.data.DataLoader(DATA, batch_sampler=sampler)
wrapped, optimizer = fabric.setup(model, optimizer)
for inputs, targets in fabric.setup_dataloaders(loader, use_distributed_sampler=False):
    optimizer.zero_grad()
    fabric.backward(torch.nn.functional.mse_loss(wrapped(inputs), targets))
    optimizer.step()
assert fabric.all_gather(torch.tensor(fabric.global_rank)).tolist() == [0, 1]
check(model)
"""


@pytest.mark.parametrize(
    ("package", "text"), [("accelerate", ACCELERATE), ("lightning_fabric", FABRIC)]
)
@pytest.mark.parametrize("launcher", ["unisono run", "torchrun"])
def test_a_training_loop(tmp_path: Path, package: str, text: str, launcher: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    before = {
        "unisono run": ("-m", "unisono", "run", "-n", "2"),
        "torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    }[launcher]
    ended = write_program(tmp_path, AROUND + text).run(before=before)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("learned on unisono 2") == 2
