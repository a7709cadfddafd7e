"""Rank 1 is stopped for longer than a call may wait, and goes on."""

# late: 1

import os
import signal
import time

import torch
import torch.distributed as dist

for step in range(20):
    dist.all_reduce(torch.ones(4))
    if dist.get_rank() == 1 and step == 10:
        stopped = os.getpid()
        if os.fork() == 0:
            time.sleep(2.5)
            os.kill(stopped, signal.SIGCONT)
            os._exit(0)
        os.kill(stopped, signal.SIGSTOP)
        os.wait()
dist.barrier()
