"""A solution of chapter 6's exercises."""

import torch

from unisono import Communicator


def swap(comm: Communicator, x: torch.Tensor) -> torch.Tensor:
    partner = comm.rank ^ 1
    received = torch.empty_like(x)
    sending = comm.isend(x, partner)
    comm.recv(received, partner)
    sending.wait()
    return received


def ring_all_reduce(comm: Communicator, x: torch.Tensor) -> None:
    n, r = comm.size, comm.rank
    parts = x.view(n, -1)
    received = torch.empty_like(parts[0])
    for step in range(n - 1):  # reduce_scatter: rank r ends with the sum of part r
        sending = comm.isend(parts[(r - 1 - step) % n], comm.next)
        comm.recv(received, comm.prev)
        sending.wait()
        parts[(r - 2 - step) % n] += received
    for step in range(n - 1):  # all_gather: pass on what came last
        sending = comm.isend(parts[(r - step) % n], comm.next)
        comm.recv(parts[(r - 1 - step) % n], comm.prev)
        sending.wait()
