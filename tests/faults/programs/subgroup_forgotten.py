"""Rank 3 forgets the call of its subgroup and waits in the world."""

# ranks: 4
# culprit: 3

import torch
import torch.distributed as dist

rank = dist.get_rank()
pair = dist.new_group([2, 3])
if rank == 2:
    dist.all_reduce(torch.ones(4), group=pair)
dist.barrier()  # <- here
