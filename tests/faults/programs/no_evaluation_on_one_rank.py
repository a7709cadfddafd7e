"""Rank 2 finds nothing to evaluate and waits in the last barrier; the others gather their
predictions (transformers #17478)."""

# culprit: 2

import torch
import torch.distributed as dist

rank = dist.get_rank()
for _ in range(3):
    dist.all_reduce(torch.ones(8))
if rank != 2:
    predictions = [torch.zeros(3) for _ in range(3)]
    dist.all_gather(predictions, torch.ones(3))  # <- here
dist.barrier()
