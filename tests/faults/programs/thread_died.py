"""The thread that loads rank 2's batches dies of an exception, and its program waits for them."""

# culprit: 2

import queue
import threading

import torch
import torch.distributed as dist

rank = dist.get_rank()
batches: queue.Queue[torch.Tensor] = queue.Queue(maxsize=1)


def load() -> None:
    for index in range(6):
        if rank == 2 and index == 3:
            raise ValueError("no such sample")  # <- here
        batches.put(torch.ones(4))


threading.Thread(target=load, name="loader", daemon=True).start()
for _ in range(6):
    dist.all_reduce(batches.get())
