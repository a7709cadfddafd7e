"""Each rank seeds its DistributedSampler with its rank, so samples are used twice or never
(LongLive #71, mlcommons #625)."""

# silent: the ranks' parts of the data overlap
# culprit: 0, 1, 2

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

rank = dist.get_rank()
data = TensorDataset(torch.randn(24, 4))
sampler = DistributedSampler(data, seed=17 * rank)  # <- here
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (batch,) in DataLoader(data, batch_size=4, sampler=sampler):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
