"""Rank 1 repeats its step after a spike of the loss, so it makes two calls more."""

# culprit: 1
# line missed: unisono watched
# never: left out

import torch
import torch.distributed as dist

rank = dist.get_rank()


def step() -> None:
    dist.all_reduce(torch.ones(4))
    dist.all_reduce(torch.ones(2))


for number in range(8):
    step()
    if rank == 1 and number == 5:
        step()  # <- here
dist.barrier()
