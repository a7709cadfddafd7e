"""Rank 2 receives from the wrong neighbour in a ring exchange (pytorch #109401, PiPPy #969)."""

# culprit: 2

import torch
import torch.distributed as dist

rank = dist.get_rank()
for step in range(4):
    to, source = (rank + 1) % 3, (rank - 1) % 3
    if rank == 2 and step == 2:
        source = (rank + 1) % 3
    got = torch.empty(4)
    sending = dist.P2POp(dist.isend, torch.ones(4), to)
    receiving = dist.P2POp(dist.irecv, got, source)
    for work in dist.batch_isend_irecv([sending, receiving]):  # <- here
        work.wait()
dist.barrier()
