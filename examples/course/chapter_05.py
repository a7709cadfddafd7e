"""A solution of chapter 5's exercise."""

import torch

from unisono import Communicator


def tree_broadcast(comm: Communicator, x: torch.Tensor) -> None:
    distance = 1
    while distance < comm.size:
        if comm.rank < distance:
            if comm.rank + distance < comm.size:
                comm.send(x, comm.rank + distance)
        elif comm.rank < 2 * distance:
            comm.recv(x, comm.rank - distance)
        distance *= 2
