"""Of two ranks one pads its sequences to another length from step 4 on (accelerate #3788,
LMCache #1379)."""

# culprit: 1
# ranks: 2

import torch
import torch.distributed as dist

rank = dist.get_rank()
for step in range(7):
    length = 8 if step < 4 or rank == 0 else 16
    found = [torch.empty(length) for _ in range(2)]
    dist.all_gather(found, torch.ones(length))  # <- here
    dist.all_reduce(torch.ones(2))
dist.barrier()
