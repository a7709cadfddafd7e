"""Of two ranks one is told by a signal that its time is over, and its handler has a barrier
(pocket-tts #277)."""

# culprit: 1
# ranks: 2

import os
import signal

import torch
import torch.distributed as dist

rank = dist.get_rank()


def save(*_):
    dist.barrier()  # <- here


signal.signal(signal.SIGUSR1, save)
for step in range(8):
    if rank == 1 and step == 4:
        os.kill(os.getpid(), signal.SIGUSR1)
    dist.all_reduce(torch.ones(3))
dist.barrier()
