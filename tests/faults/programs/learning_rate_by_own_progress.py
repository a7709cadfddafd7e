"""Rank 2 computes its learning rate from its own progress through the data (nanochat #857)."""

# silent: the models drift apart
# culprit: 2

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    progress = (step + (rank == 2 and step > 2)) / 10
    for settings in optimizer.param_groups:
        settings["lr"] = 0.1 * (1 - progress)  # <- here
    optimizer.zero_grad()
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
