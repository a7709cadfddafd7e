"""Rank 2 takes a branch without the call, and goes on to something else."""

# culprit: 2

import threading

import torch
import torch.distributed as dist

rank = dist.get_rank()
for step in range(4):
    if not (rank == 2 and step == 3):
        dist.all_reduce(torch.ones(4))
if rank == 2:
    threading.Event().wait()  # <- here
dist.barrier()
