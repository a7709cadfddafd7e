"""7. Overlap"""

from collections.abc import Callable

import torch

from unisono import Communicator


def backward(comm: Communicator, layers: list[Callable[[], torch.Tensor]]) -> list[torch.Tensor]:
    """Call every layer, the last one first: each returns its gradient. Return the gradients in the
    order of the layers, each summed over all ranks.

    This version is correct, but no layer computes while a gradient travels. Make them overlap.
    """
    gradients: list[torch.Tensor] = []
    for layer in reversed(layers):
        gradient = layer()
        comm.all_reduce(gradient)
        gradients.insert(0, gradient)
    return gradients
