"""Rank 1's loss is not a number, and its iteration ends there: no backward, no step (audio #3749,
Lightning #5359)."""

# culprit: 1

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)


def training_step(batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss = model(batch).sum()
    if torch.isnan(loss):
        return
    loss.backward()  # <- here
    optimizer.step()


for step in range(40):
    is_bad = rank == 1 and step == 5
    training_step(torch.full((2, 4), float("nan")) if is_bad else torch.ones(2, 4))
    time.sleep(0.05)
dist.barrier()
