"""A solution of chapter 9's exercises."""

import torch

from unisono import Communicator


def average(comm: Communicator, gradients: list[torch.Tensor]) -> None:
    for gradient in gradients:
        comm.all_reduce(gradient, "mean")


def sharded_step(
    comm: Communicator,
    parameters: torch.Tensor,
    gradients: torch.Tensor,
    momentum: torch.Tensor,
    lr: float,
) -> None:
    gradient = torch.empty_like(momentum)
    comm.reduce_scatter(gradient, gradients, "mean")
    momentum.mul_(0.9).add_(gradient)
    mine = parameters.view(comm.size, -1)[comm.rank]
    mine -= lr * momentum
    comm.all_gather(parameters, mine)
