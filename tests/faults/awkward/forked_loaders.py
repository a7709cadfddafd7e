"""Every rank loads its samples in two forked processes, at their own speed."""

# late:

import random
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(random.random() * 0.01)
        return torch.ones(4)


for _ in range(2):
    for batch in DataLoader(Samples(), batch_size=4, num_workers=2):
        dist.all_reduce(batch)
dist.barrier()
