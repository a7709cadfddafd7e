"""Rank 0 has a small model of its own, and another optimizer for it."""

# late:

import torch
import torch.distributed as dist

rank = dist.get_rank()
model, own = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
own_optimizer = torch.optim.SGD(own.parameters(), 0.01)
for step in range(60):
    model(torch.ones(2, 4)).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and step % 5 == 4:
        own(torch.ones(2, 4)).sum().backward()
        own_optimizer.step()
    if step % 7 == 6:
        dist.barrier()
dist.barrier()
