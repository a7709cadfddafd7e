"""An overflow that only rank 1 sees makes it leave out the clipping of gradients, a call of one
number as the others (Automodel #2468)."""

# culprit: 1

import torch
import torch.distributed as dist

rank = dist.get_rank()
for step in range(10):
    for _ in range(2):
        dist.all_reduce(torch.ones(1))
    if not (rank == 1 and step == 4):
        dist.all_reduce(torch.ones(1))  # <- here
dist.barrier()
