"""Rank 0 writes the next batch into a buffer that is still being sent (tutorials #3009)."""

# ranks: 2
# silent: rank 1 may receive the next batch instead
# culprit: 0

import torch
import torch.distributed as dist

rank = dist.get_rank()
buffer = torch.zeros(64)
for step in range(3):
    if rank == 0:
        leaving = dist.isend(buffer, 1)
        buffer.fill_(step)  # <- here
        leaving.wait()
    else:
        dist.recv(buffer, 0)
dist.barrier()
