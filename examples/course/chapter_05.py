"""A solution of chapter 5's exercise."""

import torch

from unisono import Communicator


def tree_broadcast(comm: Communicator, x: torch.Tensor) -> None:
    distance = 1 << (comm.size - 1).bit_length()
    while distance > 1:
        distance //= 2
        if comm.rank % (2 * distance) == 0 and comm.rank + distance < comm.size:
            comm.send(x, comm.rank + distance)
        elif comm.rank % (2 * distance) == distance:
            comm.recv(x, comm.rank - distance)
