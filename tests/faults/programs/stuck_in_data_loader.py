"""Rank 1 waits for a batch that nobody makes."""

# culprit: 1

import queue

import torch
import torch.distributed as dist

rank = dist.get_rank()
batches: queue.Queue[int] = queue.Queue()


def next_batch() -> int:
    return batches.get()  # <- here


for step in range(3):
    if rank == 1 and step == 2:
        next_batch()
    dist.all_reduce(torch.ones(4))
