"""Rank 0 computes in double precision."""

# culprit: 0

import torch
import torch.distributed as dist

rank = dist.get_rank()
x = torch.ones(6) if rank else torch.ones(6, dtype=torch.float64)
dist.all_reduce(x)  # <- here
dist.barrier()
