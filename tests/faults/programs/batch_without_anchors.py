"""Rank 2 leaves out the backward pass of a batch that it cannot use (Automodel #2468)."""

# culprit: 2
# line missed: unisono watched

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(4, 1))
for step in range(6):
    loss = model(torch.ones(2, 4)).sum()  # <- here
    if rank == 2 and step == 4:
        continue
    loss.backward()
    dist.all_reduce(loss.detach())
dist.barrier()
