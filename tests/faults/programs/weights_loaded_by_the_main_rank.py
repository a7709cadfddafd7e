"""Only rank 0 loads the checkpoint, after DDP has copied the first weights (speculators #926)."""

# silent: the models differ from the first step on
# culprit: 0

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
checkpoint = {"module.weight": torch.ones(1, 4), "module.bias": torch.ones(1)}
if rank == 0:
    model.load_state_dict(checkpoint)  # <- here
for _ in range(4):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
