"""Rank 1 makes two calls in the other order."""

# ranks: 3
# culprit: 1
# setups: unisono watched

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
