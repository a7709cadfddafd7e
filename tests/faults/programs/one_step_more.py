"""Rank 1 has one batch more in the third epoch: until it ends nothing says so, and it has not left
out the evaluation."""

# ranks: 4
# culprit: 1
# never: left out

import torch
import torch.distributed as dist

rank = dist.get_rank()
for epoch in range(3):
    for _ in range(3 + (rank == 1 and epoch == 2)):
        dist.all_reduce(torch.ones(4))  # <- here
        dist.all_reduce(torch.ones(2))
    dist.all_reduce(torch.ones(6))
dist.barrier()
