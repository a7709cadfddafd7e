"""Rank 1 expects rows from rank 0 that come from rank 2; its total is right
(pytorch #117486, #194559)."""

# culprit: 1

import torch
import torch.distributed as dist

rank = dist.get_rank()
for step in range(3):
    sent, wanted = [2, 3, 3], [[2, 2, 2], [3, 3, 3], [3, 3, 3]][rank]
    if rank == 1 and step == 1:
        wanted = [4, 3, 2]
    rows, received = torch.ones(sum(sent), 4), torch.zeros(sum(wanted), 4)
    dist.all_to_all_single(received, rows, wanted, sent)  # <- here
dist.barrier()
