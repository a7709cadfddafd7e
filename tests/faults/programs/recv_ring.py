"""Every rank receives from its neighbour before it sends."""

# culprit: 0, 1, 2

import torch
import torch.distributed as dist

rank = dist.get_rank()
x = torch.ones(4)
dist.recv(x, src=(rank - 1) % 3)  # <- here
dist.send(x, dst=(rank + 1) % 3)
