"""A collective in a block for rank 0 alone."""

# culprit: 0

import torch
import torch.distributed as dist

rank = dist.get_rank()
for _ in range(3):
    dist.all_reduce(torch.ones(4))
    if rank == 0:
        dist.all_reduce(torch.ones(4))  # <- here
    dist.all_reduce(torch.ones(4))
dist.barrier()
