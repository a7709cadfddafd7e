"""Rank 1 is in C code that does not let go of the GIL."""

# ranks: 3
# culprit: 1
# setups: unisono watched

import re

import torch
import torch.distributed as dist

rank = dist.get_rank()
if rank == 1:
    re.match(r"(a+)+$", "a" * 60 + "b")  # <- here
dist.all_reduce(torch.ones(4))
