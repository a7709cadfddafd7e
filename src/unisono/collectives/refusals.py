"""Saying no to arguments in a way that the other ranks hear."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from unisono.comm.arguments import NotARank
from unisono.comm.base import Communicator
from unisono.errors import UnisonoError
from unisono.torch_habits import describe_output_first, may_be_output_first, name_type
from unisono.world.world import resolve


def refuse_type(comm: Communicator, operation: str, why: str) -> NoReturn:
    """Raise TypeError about this rank's arguments, once its peers know."""
    try:
        comm.refuse(operation, why)
    except ValueError as error:
        raise TypeError(str(error)) from None


def resolve_for(function: str, group: Any) -> Communicator:
    """`resolve`, for a function that may be called with torch's outputs first: a tensor stands in
    the place of `group` then, so that the world is meant, whose other ranks hear of it."""
    try:
        return resolve(group)
    except UnisonoError:
        is_object = function.endswith("_object") and isinstance(group, (str, dict, set))
        if group is None or not (is_object or may_be_output_first(group)):
            raise
        why = f"{name_type(group)} is not a group: {describe_output_first(function)}"
        try:
            world = resolve(None)
        except UnisonoError:
            raise TypeError(why) from None
    refuse_type(world, function.removesuffix("_object"), why)


def check_rank(comm: Communicator, operation: str, rank: Any, function: str = "") -> None:
    """Refuse what is not a rank of the group; `function` is the one that was called, unless it has
    the operation's name."""
    if not isinstance(rank, int) or not 0 <= rank < comm.size:
        error = NotARank("rank", rank, comm.size)
        if isinstance(rank, (list, tuple, torch.Tensor)):
            hint = describe_output_first(function or operation)
            comm.refuse(operation, f"{name_type(rank)} is not a rank: {hint}")
        comm.refuse(operation, error.among(comm.global_ranks))


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
