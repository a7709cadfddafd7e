"""Chapter 12: a program that hangs.

`unisono run -n 4 --watch` says which rank is where. Mend it without taking the logging out.
"""

import torch

from unisono import Communicator


def train(comm: Communicator, losses: list[float], log: list[float]) -> float:
    """Return the mean of all ranks' losses that are finite. Rank 0 logs the mean of each step."""
    total, count = 0.0, 0
    for loss in losses:
        if loss != loss:  # not a number: skip this batch
            continue
        x = torch.tensor([loss])
        if comm.rank == 0:
            comm.all_reduce(x)
            log.append(x.item() / comm.size)
        total += x.item()
        count += 1
    return total / count
