"""Rank 1 starts a call late: it waits for a thread that has died."""

# culprit: 1

import threading

import torch
import torch.distributed as dist

rank = dist.get_rank()
ready = threading.Event()
if rank == 1:
    ready.wait()  # <- here
work = dist.all_reduce(torch.ones(4), async_op=True)
work.wait()
