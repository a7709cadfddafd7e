"""Two threads of each rank call at once, each on a group of its own."""

# late:

import random
import threading
import time

import torch
import torch.distributed as dist

groups = [dist.new_group(group_desc=f"thread {number}") for number in range(2)]


def work(number: int) -> None:
    for _ in range(40):
        time.sleep(random.random() * 0.01)
        dist.all_reduce(torch.ones(4), group=groups[number])


threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
dist.barrier()
