"""Rank 1 takes a lock that it holds."""

# culprit: 1

import threading

import torch
import torch.distributed as dist

rank = dist.get_rank()
lock = threading.Lock()


def save() -> None:
    with lock:
        write()


def write() -> None:
    lock.acquire()  # <- here


dist.all_reduce(torch.ones(4))
if rank == 1:
    save()
dist.all_reduce(torch.ones(4))
