"""Rank 0 waits for a message that rank 1 never sends."""

# ranks: 2
# culprit: 1

import threading

import torch
import torch.distributed as dist

rank = dist.get_rank()
dist.barrier()
if rank == 0:
    dist.recv(torch.ones(4), src=1)
else:
    threading.Event().wait()  # <- here
