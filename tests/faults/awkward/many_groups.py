"""Twenty groups, each called by its members alone, who take their time."""

# late:

import random
import time

import torch
import torch.distributed as dist

rank, size = dist.get_rank(), dist.get_world_size()
pairs = [(number % size, (number + 1) % size) for number in range(20)]
groups = [dist.new_group(sorted(pair)) for pair in pairs]
for _ in range(3):
    for pair, group in zip(pairs, groups, strict=True):
        if rank in pair:
            time.sleep(random.random() * 0.02)
            dist.all_reduce(torch.ones(4), group=group)
dist.barrier()
