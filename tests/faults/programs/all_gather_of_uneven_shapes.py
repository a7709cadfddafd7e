"""Rank 1 gathers more than the others."""

# culprit: 1
# setups: watched

import torch
import torch.distributed as dist

rank = dist.get_rank()
mine = torch.ones(3 + (rank == 1))
others = [torch.ones_like(mine) for _ in range(3)]
dist.all_gather(others, mine)  # <- here
dist.barrier()
