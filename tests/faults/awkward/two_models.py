"""Two groups of ranks train a model each, one with more passes from some step on, and then a common
one, too."""

# late:

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

rank, size = dist.get_rank(), dist.get_world_size()
first, second = dist.new_group([0]), dist.new_group(list(range(1, size)))
model = DistributedDataParallel(torch.nn.Linear(4, 1), process_group=second if rank else first)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(40):
    for _ in range(3 if rank and step >= 10 else 1):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.all_reduce(torch.ones(1))
common = DistributedDataParallel(torch.nn.Linear(4, 1))
for step in range(40):
    common(torch.ones(2, 4)).sum().backward()
    if rank and step >= 10:
        model(torch.ones(2, 4)).sum().backward()
dist.barrier()
