"""A worker process of rank 1's DataLoader never comes back with a sample (pytorch #1355)."""

# culprit: 1

import os
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

rank, parent = dist.get_rank(), os.getpid()


class Samples(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        while rank == 1 and index == 5 and os.getppid() == parent:
            time.sleep(0.05)  # <- here
        return torch.ones(4)


for batch in DataLoader(Samples(), num_workers=1, prefetch_factor=1):
    dist.all_reduce(batch)
