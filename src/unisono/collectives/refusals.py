"""Saying no to arguments in a way that the other ranks hear."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from unisono.comm.arguments import NotARank
from unisono.comm.base import Communicator
from unisono.torch_habits import one_root


def refuse_type(comm: Communicator, operation: str, why: str) -> NoReturn:
    """Raise TypeError about this rank's arguments, once its peers know."""
    try:
        comm.refuse(operation, why)
    except ValueError as error:
        raise TypeError(str(error)) from None


def check_rank(comm: Communicator, operation: str, rank: Any, root: Any = None) -> int:
    """The rank of the group that was passed as `src` or `dst`, or as `root`; 0 if none was. Refuses
    what is not one."""
    if root is not None:
        rank = one_root(comm, operation, rank, root)
    if rank is None:
        return 0
    if not isinstance(rank, int) or not 0 <= rank < comm.size:
        comm.refuse(operation, NotARank("rank", rank, comm.size).among(comm.global_ranks))
    return rank


def check_out(comm: Communicator, operation: str, out: Any, dtype: Any, shape: Any) -> None:
    """Refuse an `out` of another dtype or shape than the result has."""
    if out.dtype != dtype or tuple(out.shape) != tuple(shape):
        given, wanted = f"{out.dtype} of shape {tuple(out.shape)}", f"{dtype} of {tuple(shape)}"
        comm.refuse(operation, f"out is {given}, and the result {wanted}")


def as_dense_tensor(comm: Communicator, operation: str, tensor: Any) -> torch.Tensor:
    """A tensor, or an array as a tensor of the same memory. Refuses what has no plain memory."""
    if not isinstance(tensor, torch.Tensor):
        try:
            return torch.from_numpy(tensor)
        except (TypeError, ValueError) as error:
            refuse_type(comm, operation, str(error))
    if tensor.layout is not torch.strided:
        refuse_type(comm, operation, f"{tensor.layout} has no plain memory: pass a dense tensor")
    return tensor
