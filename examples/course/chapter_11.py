"""A solution of chapter 11's exercises."""

from collections.abc import Callable

import torch

from unisono import Communicator


def all_agree(comm: Communicator, agrees: bool) -> bool:
    vote = torch.tensor([int(agrees)])
    comm.all_reduce(vote, "min")
    return bool(vote.item())


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
