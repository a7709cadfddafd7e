"""Every rank makes the group that it is in, and none of the others' (pytorch #38375, #130102)."""

# culprit: 0,1,2,3
# ranks: 4

import torch
import torch.distributed as dist

rank = dist.get_rank()
members = [0, 1] if rank < 2 else [2, 3]
group = dist.new_group(members)  # <- here
dist.all_reduce(torch.ones(1), group=group)
dist.barrier()
