"""Rank 2 has no score for an empty batch and does not share it; the gradients, which are longer,
come next (Lightning #19106)."""

# culprit: 2

import torch
import torch.distributed as dist

rank = dist.get_rank()
for step in range(5):
    scores = {"loss": torch.ones(1), "accuracy": torch.ones(1)}
    if rank == 2 and step == 2:
        del scores["accuracy"]
    for score in scores.values():
        dist.all_reduce(score)  # <- here
    dist.all_reduce(torch.ones(100))
