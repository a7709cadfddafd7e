"""Three ranks make groups of two that only their members make, in an order that is a circle
(sglang #15805)."""

# culprit: 0,1,2

import torch
import torch.distributed as dist

rank = dist.get_rank()
orders = [[(0, 1), (0, 2)], [(1, 2), (0, 1)], [(0, 2), (1, 2)]]
for members in orders[rank]:
    group = dist.new_group(list(members), use_local_synchronization=True)  # <- here
    dist.all_reduce(torch.ones(1), group=group)
