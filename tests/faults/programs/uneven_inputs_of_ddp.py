"""Rank 2 has one batch less and goes to the barrier after the loop, while the others are in
backward (pytorch #33148)."""

# culprit: 2

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(4, 1))
for _ in range(5 if rank == 2 else 6):
    model(torch.ones(2, 4)).sum().backward()
dist.barrier()  # <- here
dist.barrier()
