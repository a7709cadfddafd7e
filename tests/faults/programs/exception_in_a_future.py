"""Rank 2's loader fails in a thread pool whose futures nobody reads, and its program waits."""

# culprit: 2
# never: different order

import queue
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

rank = dist.get_rank()
batches: queue.Queue[torch.Tensor] = queue.Queue()


def load(index: int) -> None:
    if rank == 2 and index == 3:
        raise ValueError("no such sample")  # <- here
    batches.put(torch.ones(4))


pool = ThreadPoolExecutor(1)
futures = [pool.submit(load, index) for index in range(6)]
for _ in range(6 if rank != 2 else 7):
    dist.all_reduce(batches.get())
