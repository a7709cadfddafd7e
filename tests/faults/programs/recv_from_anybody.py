"""Rank 0 receives a result from anybody before it goes on; rank 2 never sends its own."""

# culprit: 2

import threading

import torch
import torch.distributed as dist

rank = dist.get_rank()
result = torch.ones(4)
if rank == 0:
    for _ in range(2):
        dist.recv(result)
elif rank == 1:
    dist.send(result, 0)
else:
    threading.Event().wait()  # <- here
dist.barrier()
