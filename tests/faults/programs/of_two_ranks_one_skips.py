"""Of two ranks one leaves out a call in step 4, by a random number of its own
(encodec-pytorch #30)."""

# culprit: 1
# ranks: 2

import torch
import torch.distributed as dist

rank = dist.get_rank()
for step in range(8):
    if not (rank == 1 and step == 4):
        dist.all_reduce(torch.ones(2))  # <- here
    dist.all_reduce(torch.ones(2))
    dist.all_reduce(torch.ones(2))
dist.barrier()
