"""Both ranks send first: on NCCL, and here, neither send returns."""

# ranks: 2
# culprit: 0, 1
# setups: unisono

import torch
import torch.distributed as dist

rank = dist.get_rank()
x = torch.ones(4)
dist.send(x, dst=1 - rank)  # <- here
dist.recv(x, src=1 - rank)
