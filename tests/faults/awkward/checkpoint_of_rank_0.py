"""Rank 0 writes a checkpoint for long, twice; the others wait in the next call."""

# late: 0

import time

import torch
import torch.distributed as dist

for step in range(30):
    dist.all_reduce(torch.ones(4))
    if dist.get_rank() == 0 and step in (10, 20):
        time.sleep(2)
dist.barrier()
