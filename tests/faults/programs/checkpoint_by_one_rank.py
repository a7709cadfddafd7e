"""Rank 0 writes a checkpoint and waits for a rank that will not come."""

# ranks: 3
# culprit: 1, 2
# setups: unisono watched

import threading

import torch.distributed as dist

rank = dist.get_rank()
if rank == 0:
    dist.barrier()
else:
    threading.Event().wait()  # <- here
