"""Rank 1 has one batch less to evaluate and goes back to training (prime-rl #2516)."""

# culprit: 1

import torch
import torch.distributed as dist

rank = dist.get_rank()
for epoch in range(3):
    for _ in range(4):
        dist.all_reduce(torch.ones(8))  # <- here
    for _ in range(2 if rank == 1 and epoch == 1 else 3):
        dist.all_gather([torch.empty(2) for _ in range(3)], torch.ones(2))
dist.barrier()
