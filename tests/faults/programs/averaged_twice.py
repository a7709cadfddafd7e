"""DDP has averaged the gradients, and the program sums them again (sd-scripts #989)."""

# silent: the gradients are three times too large
# culprit: 0, 1, 2

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).sum().backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)  # <- here
    optimizer.step()
