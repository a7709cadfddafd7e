"""Chapter 5: a broadcast in log2(n) steps."""

import torch

from unisono import Communicator


def tree_broadcast(comm: Communicator, x: torch.Tensor) -> None:
    """Give every rank rank 0's x, with comm.send and comm.recv.

    In each step every rank that has x sends it to one that does not: with 8 ranks three steps are
    enough, and no rank sends more than three messages. Any number of ranks must work.
    """
    raise NotImplementedError
