"""Rank 1 is killed, as by the kernel when memory is short."""

# culprit: 1

import os
import signal

import torch
import torch.distributed as dist

rank = dist.get_rank()
dist.all_reduce(torch.ones(4))  # <- here
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(4))
