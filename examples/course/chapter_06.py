"""A solution of chapter 6's exercise."""

import torch

from unisono import Communicator


def swap(comm: Communicator, x: torch.Tensor) -> torch.Tensor:
    partner = comm.rank ^ 1
    received = torch.empty_like(x)
    sending = comm.isend(x, partner)
    comm.recv(received, partner)
    sending.wait()
    return received
