"""Rank 1 calls a helper with a collective in it once more than the others."""

# culprit: 1

import torch
import torch.distributed as dist

rank = dist.get_rank()


def report_loss() -> None:
    dist.all_reduce(torch.ones(1))


for step in range(2):
    dist.all_reduce(torch.ones(1))
    report_loss()
    if rank == 1 and step == 1:
        dist.all_reduce(torch.ones(1))  # <- here
    dist.all_reduce(torch.ones(1))
