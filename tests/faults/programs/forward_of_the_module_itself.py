"""The program calls the module inside of DDP, and DDP averages nothing (icefall #226)."""

# silent: the models drift apart
# culprit: 0, 1, 2

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for _ in range(4):
    optimizer.zero_grad()
    model.module(torch.randn(2, 4)).sum().backward()  # <- here
    optimizer.step()
