"""Rank 0 writes a checkpoint and waits for a rank that will not come."""

# culprit: 1, 2

import threading

import torch.distributed as dist

rank = dist.get_rank()
if rank == 0:
    dist.barrier()
else:
    threading.Event().wait()  # <- here
