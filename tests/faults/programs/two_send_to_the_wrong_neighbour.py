"""Ranks 2 and 3 send to their left neighbours once, and healthy ranks 0 and 1 end in a cycle."""

# ranks: 4
# culprit: 2, 3

import torch
import torch.distributed as dist

rank = dist.get_rank()
for step in range(6):
    to, source = (rank + 1) % 4, (rank - 1) % 4
    if rank > 1 and step == 4:
        to = (rank - 1) % 4
    got = torch.empty(4)
    sending = dist.isend(torch.ones(4), to)  # <- here
    dist.recv(got, source)
    sending.wait()
    dist.all_reduce(got)
dist.barrier()
