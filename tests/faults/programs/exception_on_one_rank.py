"""Rank 2 raises; the others wait for it."""

# culprit: 2

import torch
import torch.distributed as dist

rank = dist.get_rank()
for step in range(3):
    if rank == 2 and step == 2:
        raise ValueError("a bad batch")  # <- here
    dist.all_reduce(torch.ones(4))
