"""Rank 0 makes a step less, and ends."""

# culprit: 0

import torch
import torch.distributed as dist

rank = dist.get_rank()
steps = 2 if rank == 0 else 3
for _ in range(steps):
    dist.all_reduce(torch.ones(4))  # <- here
