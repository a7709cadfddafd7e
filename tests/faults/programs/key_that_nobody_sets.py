"""Ranks 1 and 2 wait for a key in the store that rank 0 sets only with a checkpoint
(pytorch #53840)."""

# culprit: 1, 2

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

rank = dist.get_rank()
store = _get_default_store()
for _ in range(3):
    dist.all_reduce(torch.ones(4))
if rank > 0:
    store.get("checkpoint-3")  # <- here
dist.all_reduce(torch.ones(4))
