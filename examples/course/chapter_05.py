"""A solution of chapter 5's exercises."""

import torch

from unisono import Communicator


def children(rank: int, size: int) -> list[int]:
    lowest_bit = rank & -rank if rank else size
    found, distance = [], 1
    while distance < lowest_bit and rank + distance < size:
        found.append(rank + distance)
        distance *= 2
    return found


def tree_broadcast(comm: Communicator, x: torch.Tensor) -> None:
    distance = 1 << (comm.size - 1).bit_length()
    while distance > 1:
        distance //= 2
        if comm.rank % (2 * distance) == 0 and comm.rank + distance < comm.size:
            comm.send(x, comm.rank + distance)
        elif comm.rank % (2 * distance) == distance:
            comm.recv(x, comm.rank - distance)
