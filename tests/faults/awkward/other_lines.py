"""Rank 0 makes the same calls on lines of its own, and one optimizer steps less often there."""

# late:

import torch
import torch.distributed as dist

rank = dist.get_rank()
parameter = torch.nn.Parameter(torch.ones(4))
parameter.grad = torch.zeros(4)
optimizer = torch.optim.SGD([parameter], 0.1)
for step in range(40):
    if rank == 0:
        dist.all_reduce(torch.ones(4))
        dist.broadcast(torch.ones(2), 0)
    else:
        dist.all_reduce(torch.ones(4))
        dist.broadcast(torch.ones(2), 0)
    if rank or step % 2:
        optimizer.step()
dist.barrier()
