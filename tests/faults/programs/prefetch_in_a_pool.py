"""Rank 2's pool has a collective call in its tasks; one of them fails before it."""

# ranks: 4
# culprit: 2
# never: different order

from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

rank = dist.get_rank()
group = dist.new_group([0, 1, 2, 3])
pool = ThreadPoolExecutor(1)


def prefetch(step: int) -> None:
    if rank == 2 and step == 3:
        raise OSError("no such file")  # <- here
    dist.broadcast(torch.ones(3), 0, group=group)


for step in range(5):
    future = pool.submit(prefetch, step)
    if rank != 2:
        future.result()
    dist.all_reduce(torch.ones(4))
dist.barrier()
