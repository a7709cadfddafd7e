"""Two stages tell each other the shapes of their activations, and both send first
(Megatron-LM #5100)."""

# ranks: 2
# culprit: 0, 1

import torch
import torch.distributed as dist

rank = dist.get_rank()
neighbour = 1 - rank
theirs = torch.empty(3)
for _ in range(2):
    dist.send(torch.ones(3), neighbour)  # <- here
    dist.recv(theirs, neighbour)
