"""Rank 1 takes its buckets out of a set in another order (Megatron-LM #2218, apex #18)."""

# culprit: 1

import torch
import torch.distributed as dist

rank = dist.get_rank()
for step in range(4):
    buckets = [6, 6, 9, 12]
    if rank == 1 and step == 2:
        buckets = [6, 12, 9, 6]
    works = []
    for size in buckets:
        out = torch.empty(size // 3)
        works.append(dist.reduce_scatter_tensor(out, torch.ones(size), async_op=True))  # <- here
    for work in works:
        work.wait()
dist.barrier()
