"""Rank 1 has one batch less, and waits in the barrier after the loop."""

# culprit: 1

import torch
import torch.distributed as dist

rank = dist.get_rank()
for _ in range(3 if rank == 1 else 4):
    dist.all_reduce(torch.ones(4))
dist.barrier()  # <- here
dist.barrier()
