"""Rank 1 wants the maximum where the others sum."""

# ranks: 3
# culprit: 1
# setups: unisono watched

import torch
import torch.distributed as dist

rank = dist.get_rank()
op = dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM
dist.all_reduce(torch.ones(5), op=op)  # <- here
dist.barrier()
