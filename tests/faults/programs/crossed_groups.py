"""Two ranks enter two groups in opposite order."""

# ranks: 2
# culprit: 0, 1

import torch
import torch.distributed as dist

rank = dist.get_rank()
tensor_group = dist.new_group([0, 1])
data_group = dist.new_group([0, 1])
first, second = (tensor_group, data_group) if rank == 0 else (data_group, tensor_group)
dist.all_reduce(torch.ones(4), group=first)  # <- here
dist.all_reduce(torch.ones(4), group=second)
