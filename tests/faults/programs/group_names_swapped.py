"""Rank 3 has swapped the names of two groups of the same ranks."""

# ranks: 4
# culprit: 3

import torch
import torch.distributed as dist

rank = dist.get_rank()
tensor_group, data_group = dist.new_group([0, 1, 2, 3]), dist.new_group([0, 1, 2, 3])
if rank == 3:
    tensor_group, data_group = data_group, tensor_group
dist.all_reduce(torch.ones(4), group=tensor_group)  # <- here
dist.all_reduce(torch.ones(4), group=data_group)
