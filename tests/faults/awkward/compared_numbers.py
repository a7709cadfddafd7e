"""Statistics of BatchNorm differ from rank to rank, as they should, and all else is compared."""

# late:

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from unisono import watch

torch.manual_seed(dist.get_rank())
watch.sanitize()
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)))
optimizer = torch.optim.Adam(model.parameters())
for _ in range(20):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
dist.barrier()
