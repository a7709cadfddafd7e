"""Chapter 2: which collective moves this?"""

import torch

from unisono import Communicator


def transpose(comm: Communicator, row: torch.Tensor) -> torch.Tensor:
    """Rank r has row r of a square matrix, one element for each rank. Return its column r.

    One call of one collective does it.
    """
    raise NotImplementedError
