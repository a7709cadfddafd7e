"""Rank 1 finds no work and returns."""

# culprit: 1

import sys

import torch
import torch.distributed as dist

rank = dist.get_rank()
for step in range(3):
    dist.all_reduce(torch.ones(4))  # <- here
    if rank == 1 and step == 1:
        sys.exit(0)
