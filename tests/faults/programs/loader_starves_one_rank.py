"""Rank 1 waits for its data in every step, but is last in only one of the step's two calls."""

# culprit: 1

import time

import torch
import torch.distributed as dist

rank = dist.get_rank()


def load() -> torch.Tensor:
    if rank == 1:
        time.sleep(0.06)  # <- here
    return torch.ones(8)


for _ in range(60):
    batch = load()
    dist.all_reduce(batch)
    time.sleep(0.002 * (2 if rank == 2 else 1))
    dist.all_reduce(torch.ones(1))
