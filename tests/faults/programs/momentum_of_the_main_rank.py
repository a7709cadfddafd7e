"""Only rank 0 loads the state of its optimizer (PaddleNLP #7256)."""

# silent: the models drift apart
# culprit: 0

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
saved = optimizer.state_dict()
saved["state"] = {0: {"momentum_buffer": torch.ones(1, 4)}, 1: {"momentum_buffer": torch.ones(1)}}
if rank == 0:
    optimizer.load_state_dict(saved)  # <- here
for _ in range(4):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
