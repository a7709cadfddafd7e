"""A solution of chapter 11's exercise."""

from collections.abc import Callable

import torch

from unisono import Communicator


def update(comm: Communicator, weights: torch.Tensor, load: Callable[[torch.Tensor], None]) -> bool:
    staged = weights.clone()
    comm.broadcast(staged, 0)
    fits = torch.ones(1)
    if comm.rank != 0:
        try:
            load(staged)
        except ValueError:
            fits.zero_()
    comm.all_reduce(fits, "min")
    if fits.item():
        weights.copy_(staged)
    return bool(fits.item())
