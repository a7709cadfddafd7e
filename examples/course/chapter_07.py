"""A solution of chapter 7's exercise."""

from collections.abc import Callable

import torch

from unisono import Communicator


def backward(comm: Communicator, layers: list[Callable[[], torch.Tensor]]) -> list[torch.Tensor]:
    gradients, works = [], []
    for layer in reversed(layers):
        gradient = layer()
        works.append(comm.all_reduce(gradient, async_op=True))
        gradients.insert(0, gradient)
    for work in works:
        work.wait()
    return gradients
