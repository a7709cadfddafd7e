"""Rank 1 is left out of a call by an `if`, and ends: the beginner's first bug
(pytorch #60652)."""

# culprit: 1

import torch
import torch.distributed as dist

if dist.get_rank() != 1:
    dist.all_reduce(torch.ones(1))  # <- here
