"""Rank 2 sends to its left neighbour instead of its right one, in the third step of a ring."""

# ranks: 4
# culprit: 2

import torch
import torch.distributed as dist

rank = dist.get_rank()
for step in range(4):
    to, source = (rank + 1) % 4, (rank - 1) % 4
    if rank == 2 and step == 2:
        to = (rank - 1) % 4
    got = torch.empty(4)
    sending = dist.P2POp(dist.isend, torch.ones(4), to)
    receiving = dist.P2POp(dist.irecv, got, source)
    for work in dist.batch_isend_irecv([sending, receiving]):  # <- here
        work.wait()
dist.barrier()
