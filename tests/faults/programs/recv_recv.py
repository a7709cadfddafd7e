"""Both ranks receive first."""

# ranks: 2
# culprit: 0, 1

import torch
import torch.distributed as dist

rank = dist.get_rank()
x = torch.ones(4)
dist.recv(x, src=1 - rank)  # <- here
dist.send(x, dst=1 - rank)
