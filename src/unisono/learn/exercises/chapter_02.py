"""2. The collectives"""

import torch

from unisono import Communicator


def transpose(comm: Communicator, row: torch.Tensor) -> torch.Tensor:
    """Rank r has row r of a square matrix, one element for each rank. Return column r: one
    collective is enough."""
    raise NotImplementedError
