"""Rank 1 uses what it receives before it has waited for it (tutorials #3009)."""

# ranks: 2
# silent: rank 1 computes with old numbers
# culprit: 1

import torch
import torch.distributed as dist

rank = dist.get_rank()
for step in range(3):
    activation = torch.zeros(64)
    if rank == 0:
        dist.send(activation + step, 1)
    else:
        arriving = dist.irecv(activation, 0)
        total = activation.sum()  # <- here
        arriving.wait()
dist.barrier()
