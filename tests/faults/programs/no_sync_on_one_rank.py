"""Rank 1 counts its micro-batches differently and stays in no_sync in step 4: its gradients are one
step late from then on (FunASR #3472)."""

# culprit: 1

import contextlib

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(4, 1))
for step in range(8):
    keeps = rank == 1 and step == 4
    with model.no_sync() if keeps else contextlib.nullcontext():
        model(torch.ones(2, 4)).sum().backward()  # <- here
dist.barrier()
