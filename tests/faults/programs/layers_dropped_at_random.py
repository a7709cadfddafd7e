"""After the warm-up layers are dropped at random, and each has a sum in it; rank 2's generator has
another seed (fairseq #3875, fairscale #796)."""

# culprit: 2

import random

import torch
import torch.distributed as dist

rank = dist.get_rank()
generator = random.Random(1 if rank == 2 else 0)
weight = torch.ones(4, requires_grad=True)
optimizer = torch.optim.SGD([weight], 0.1)
for step in range(10):
    for _ in range(6):
        if step >= 3 and generator.random() < 0.3:
            continue
        dist.all_reduce(torch.ones(4))  # <- here
    weight.grad = torch.ones(4)
    optimizer.step()
dist.barrier()
