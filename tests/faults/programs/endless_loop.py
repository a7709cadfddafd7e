"""Rank 2 computes for ever, in Python."""

# culprit: 2

import torch
import torch.distributed as dist

rank = dist.get_rank()


def converge() -> None:
    while True:  # <- here
        pass


if rank == 2:
    converge()
dist.all_reduce(torch.ones(4))
