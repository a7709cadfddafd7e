"""Chapter 9: a sharded optimizer (ZeRO, stage 1)."""

import torch

from unisono import Communicator


def sharded_step(
    comm: Communicator,
    parameters: torch.Tensor,
    gradients: torch.Tensor,
    momentum: torch.Tensor,
    lr: float,
) -> None:
    """One step of SGD with momentum 0.9 on the mean of the ranks' gradients.

    All parameters lie in one tensor, whose size is a multiple of comm.size. `momentum` is this
    rank's part of it alone: update it, update the same part of the parameters, and give every rank
    every part. No rank may see more than its own part of the summed gradients.
    """
    raise NotImplementedError
