"""A group is made by its members alone; the other rank goes on to the next call (pytorch #25390)."""

# culprit: 2

import torch
import torch.distributed as dist

rank = dist.get_rank()
dist.all_reduce(torch.ones(1))
if rank < 2:
    group = dist.new_group([0, 1])  # <- here
dist.barrier()
