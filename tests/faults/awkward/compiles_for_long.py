"""Rank 1 compiles before its first call, which takes it longer than a call may wait."""

# late: 1

import time

import torch
import torch.distributed as dist

if dist.get_rank() == 1:
    time.sleep(2.5)
for _ in range(20):
    dist.all_reduce(torch.ones(4))
