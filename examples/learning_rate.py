"""A learning rate that changes during training: rank 0 decides, all ranks follow.

Ranks see different losses, and would decay at different times. The value arrives exactly: as a
float32 tensor 0.1 would be 0.10000000149 on all ranks.

    unisono run -n 4 examples/learning_rate.py
"""

import torch

import unisono

EPOCHS = 8


def validation_loss(epoch: int, rank: int) -> float:
    """Falls for a while, on some ranks longer than on others."""
    return max(5 - epoch, 2 - rank) + 0.1 * rank


def decide(losses: list[float], lr: float) -> float:
    """A tenth if the last epoch was no better than the one before."""
    stuck = len(losses) > 1 and losses[-1] >= losses[-2]
    return lr / 10 if stuck else lr


def train(rank: int) -> tuple[list[float], torch.Tensor]:
    """The learning rate of each epoch, and the parameter at the end."""
    parameter = torch.ones(1, dtype=torch.float64)
    losses, rates, lr = [], [], 0.1
    for epoch in range(EPOCHS):
        losses.append(validation_loss(epoch, rank))
        lr = unisono.broadcast_object(decide(losses, lr))  # what rank 0 decides
        rates.append(lr)  # with an optimizer: for group in optimizer.param_groups: group["lr"] = lr
        parameter -= lr * 2 * parameter  # the gradient of its square
    return rates, parameter


def main() -> None:
    comm = unisono.init()
    rates, parameter = train(comm.rank)
    decayed = [0.1 / 10, 0.1 / 10 / 10, 0.1 / 10 / 10 / 10, 0.1 / 10 / 10 / 10 / 10]
    expected = [0.1] * 4 + decayed  # rank 0's losses: 5, 4, 3, 2, 2, 2, 2, 2
    assert rates == expected, f"rank {comm.rank} used {rates}, not {expected}"
    everyone = unisono.all_gather(parameter)
    assert all(torch.equal(parameter, theirs) for theirs in everyone), (
        f"ranks drifted apart: {everyone}"
    )
    if comm.rank == 0:
        print("learning rates on every rank:", ", ".join(f"{lr:g}" for lr in rates))
    unisono.shutdown()


if __name__ == "__main__":
    main()
