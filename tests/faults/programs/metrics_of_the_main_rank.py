"""A function for the main rank alone shares a metric with everybody (miles #2684)."""

# culprit: 0

import torch
import torch.distributed as dist

rank = dist.get_rank()


def log_step() -> None:
    dist.all_reduce(torch.ones(2))  # <- here


for step in range(4):
    dist.all_reduce(torch.ones(8))
    if rank == 0 and step == 2:
        log_step()
    dist.all_reduce(torch.ones(8))
dist.barrier()
