"""Rank 1's batch has no image in step 3, so parameters of its DDP get no gradient; its next forward
pass raises (pytorch #45933)."""

# culprit: 1

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

rank = dist.get_rank()


class TwoHeads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.text = torch.nn.Linear(4, 1)
        self.image = torch.nn.Linear(4, 1)

    def forward(self, x, has_image):
        return self.text(x) + self.image(x) if has_image else self.text(x)


model = DistributedDataParallel(TwoHeads())
for step in range(8):
    loss = model(torch.ones(2, 4), not (rank == 1 and step == 3)).sum()  # <- here
    loss.backward()
dist.barrier()
