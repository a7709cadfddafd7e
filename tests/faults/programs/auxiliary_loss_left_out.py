"""Rank 1's losses lack a name in one step, so the sums that follow are of other losses
(Lightning #19106, #21409)."""

# culprit: 1

import torch
import torch.distributed as dist

rank = dist.get_rank()
for step in range(8):
    losses = {"loss": torch.ones(1), "auxiliary": torch.ones(1)}
    if rank == 1 and step == 3:
        del losses["auxiliary"]
    for loss in losses.values():
        dist.all_reduce(loss)  # <- here
    dist.all_reduce(torch.ones(1))
dist.barrier()
