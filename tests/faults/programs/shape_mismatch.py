"""Rank 1 has one element more."""

# culprit: 1

import torch
import torch.distributed as dist

rank = dist.get_rank()
size = 10 if rank != 1 else 11
dist.all_reduce(torch.ones(4))
dist.all_reduce(torch.ones(size))  # <- here
