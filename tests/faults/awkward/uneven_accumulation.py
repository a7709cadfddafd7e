"""The last batch of an epoch is accumulated from fewer passes on some ranks than on others."""

# late:

import contextlib

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for _ in range(3):
    for batch in range(6):
        passes = 3 if batch < 5 else 1 + dist.get_rank()
        for number in range(1, passes + 1):
            with contextlib.nullcontext() if number == passes else model.no_sync():
                model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.all_reduce(torch.ones(1))
dist.barrier()
