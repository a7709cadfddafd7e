"""Rank 1 sends with another tag than rank 0 receives, and goes on."""

# ranks: 2
# culprit: 1

import threading

import torch
import torch.distributed as dist

rank = dist.get_rank()
x = torch.ones(4)
if rank == 0:
    dist.recv(x, src=1, tag=7)
else:
    work = dist.isend(x, dst=0, tag=8)
    threading.Event().wait()  # <- here
