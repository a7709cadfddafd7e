"""Rank 1 makes two calls in the other order."""

# culprit: 1

import torch
import torch.distributed as dist

rank = dist.get_rank()
x, y = torch.ones(4), torch.ones(7)
if rank == 1:
    dist.all_reduce(y)  # <- here
    dist.all_reduce(x)
else:
    dist.all_reduce(x)
    dist.all_reduce(y)
