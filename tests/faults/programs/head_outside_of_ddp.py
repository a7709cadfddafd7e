"""The head is not part of the DDP model, so its gradients are never averaged (sd-scripts #924)."""

# silent: the heads drift apart
# culprit: 0, 1, 2

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

torch.manual_seed(0)
body = DistributedDataParallel(torch.nn.Linear(4, 4))
head = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)  # <- here
torch.manual_seed(dist.get_rank())
for _ in range(4):
    optimizer.zero_grad()
    head(body(torch.randn(2, 4))).sum().backward()
    optimizer.step()
