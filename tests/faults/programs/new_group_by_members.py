"""A group is made by its members alone; rank 2 then makes another one with them, which is the
second group to them and the first to it (pytorch #25390)."""

# culprit: 2

import torch
import torch.distributed as dist

rank = dist.get_rank()
if rank < 2:
    pair = dist.new_group([0, 1])  # <- here
everybody = dist.new_group([0, 1, 2])
dist.all_reduce(torch.ones(1), group=everybody)
