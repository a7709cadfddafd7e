"""Rank 2 thinks that somebody else is the root."""

# culprit: 2

import torch
import torch.distributed as dist

rank = dist.get_rank()
root = 1 if rank == 2 else 0
dist.broadcast(torch.ones(5), src=root)  # <- here
dist.barrier()
