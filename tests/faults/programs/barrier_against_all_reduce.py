"""Rank 2 is in a barrier, the others in an all_reduce."""

# culprit: 2

import torch
import torch.distributed as dist

rank = dist.get_rank()
if rank == 2:
    dist.barrier()  # <- here
else:
    dist.all_reduce(torch.ones(4))
dist.barrier()
