"""Uneven inputs under Join, in each of three epochs: rank 0 has the fewest."""

# late:

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for _ in range(3):
    with Join([model]):
        for _ in range(20 + 5 * dist.get_rank()):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
dist.barrier()
