"""A thread that saves a checkpoint has a barrier in the group in which training goes on
(KempnerForge #104)."""

# culprit: 0,1,2

import threading
import time

import torch
import torch.distributed as dist

rank = dist.get_rank()
step = 0


def save() -> None:
    while step < 6 + 5 * rank:  # as long as its part takes to write
        time.sleep(0.001)
    dist.barrier()  # <- here


for step in range(30):
    if step == 5:
        thread = threading.Thread(target=save, name="checkpoint")
        thread.start()
    dist.all_reduce(torch.ones(4))
    time.sleep(0.01)
thread.join()
