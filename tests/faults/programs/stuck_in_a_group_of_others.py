"""In a group of ranks 1 and 3, rank 3 waits for a lock."""

# ranks: 4
# culprit: 3

import threading

import torch
import torch.distributed as dist

rank = dist.get_rank()
even, odd = dist.new_group([0, 2]), dist.new_group([1, 3])
group = odd if rank % 2 else even
lock = threading.Lock()
for step in range(5):
    if rank == 3 and step == 3:
        lock.acquire()
        lock.acquire()  # <- here
    dist.all_reduce(torch.ones(4), group=group)
dist.barrier()
