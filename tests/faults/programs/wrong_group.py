"""Rank 3 sums its activations once in the data-parallel group instead of the tensor-parallel one
(vllm #45917, flashinfer #3247)."""

# culprit: 3
# ranks: 4

import torch
import torch.distributed as dist

rank = dist.get_rank()
tensor_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
data_groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
tensor_group, data_group = tensor_groups[rank // 2], data_groups[rank % 2]
for step in range(6):
    group = data_group if rank == 3 and step == 3 else tensor_group
    dist.all_reduce(torch.ones(4), group=group)  # <- here
    dist.all_reduce(torch.ones(4), group=data_group)
dist.barrier()
