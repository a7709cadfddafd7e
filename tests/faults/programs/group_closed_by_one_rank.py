"""Rank 1 destroys a group with which rank 2 still wants to sum (pytorch #75097)."""

# culprit: 1
# never: wait for each other

import torch
import torch.distributed as dist

rank = dist.get_rank()
pair = dist.new_group([1, 2])
for _ in range(4):
    if rank > 0:
        dist.all_reduce(torch.ones(4), group=pair)
if rank == 1:
    dist.destroy_process_group(pair)  # <- here
if rank == 2:
    dist.all_reduce(torch.ones(4), group=pair)
dist.barrier()
