"""Rank 0 sleeps, as if it wrote a checkpoint to a slow disk."""

# culprit: 0

import time

import torch
import torch.distributed as dist

rank = dist.get_rank()
dist.all_reduce(torch.ones(4))
if rank == 0:
    time.sleep(60)  # <- here
dist.all_reduce(torch.ones(4))
