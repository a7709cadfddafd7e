"""Rank 1 is in C code that does not let go of the GIL."""

# culprit: 1

import re

import torch
import torch.distributed as dist

rank = dist.get_rank()
if rank == 1:
    re.match(r"(a+)+$", "a" * 60 + "b")  # <- here
dist.all_reduce(torch.ones(4))
