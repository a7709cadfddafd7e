"""12. What goes wrong"""

import torch

import unisono


def train(comm: unisono.Communicator, losses: list[float], log: list[float]) -> float:
    """Return the mean of all finite losses of all ranks. Rank 0 logs the mean of each step.

    This version fails for two reasons. Repair it, but keep the log.
    """
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


if __name__ == "__main__":
    print(train(unisono.init(timeout_s=10), [1.0, 2.0], []))
