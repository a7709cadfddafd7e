"""Rank 1 drops a sample that has too few tokens, and gathers once less than the others
(TorchSpec #126)."""

# culprit: 1

import torch
import torch.distributed as dist

rank = dist.get_rank()
for sample in range(6):
    if rank == 1 and sample == 3:
        continue
    shards = [torch.zeros(4) for _ in range(3)]
    dist.all_gather(shards, torch.ones(4))  # <- here
    if sample % 2:
        dist.all_reduce(torch.ones(1))
dist.barrier()
