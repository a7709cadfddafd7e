"""3. all_reduce is reduce_scatter and all_gather"""

import torch

from unisono import Communicator


def ring_all_reduce(comm: Communicator, x: torch.Tensor) -> None:
    """Replace x on every rank by the sum of all x. `x.numel()` is a multiple of comm.size.

    Use comm.isend(part, comm.next) and comm.recv(buffer, comm.prev) alone. No rank may send more
    than 2 (n - 1) / n of x.
    """
    raise NotImplementedError
