"""Rank 2 takes longer than the others in every step, in its data; nothing fails."""

# culprit: 2

import time

import torch
import torch.distributed as dist

rank = dist.get_rank()


def load() -> torch.Tensor:
    if rank == 2:
        time.sleep(0.09)  # <- here
    return torch.ones(8)


for _ in range(50):
    batch = load()
    time.sleep(0.01)
    dist.all_reduce(batch)
