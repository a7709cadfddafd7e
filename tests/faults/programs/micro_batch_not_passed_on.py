"""The middle stage of a pipeline drops a micro-batch and does not pass it on
(TensorRT-LLM #9659)."""

# culprit: 1

import torch
import torch.distributed as dist

rank = dist.get_rank()
x = torch.ones(4)
for batch in range(6):
    if rank > 0:
        dist.recv(x, rank - 1)
    if rank == 1 and batch == 2:
        continue
    if rank < 2:
        dist.send(x, rank + 1)  # <- here
dist.barrier()
