"""Rank 1 wants the maximum where the others sum."""

# culprit: 1

import torch
import torch.distributed as dist

rank = dist.get_rank()
op = dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM
dist.all_reduce(torch.ones(5), op=op)  # <- here
dist.barrier()
