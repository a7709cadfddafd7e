"""What the functions are given: tensors, arrays and parts of them, checked and taken apart."""

from __future__ import annotations

from typing import Any

import numpy
import torch

from unisono.collectives.refusals import as_dense_tensor, check_out, refuse_type
from unisono.collectives.results import ResultWork
from unisono.comm.base import Communicator

_Tensor = torch.Tensor


def is_tensor(tensor: Any) -> bool:
    """Whether it is a tensor or an array: what is neither is a structure."""
    return isinstance(tensor, (_Tensor, numpy.ndarray))


def check_tensor(comm: Communicator, operation: str, tensor: Any) -> None:
    """Refuse what is neither a tensor nor an array."""
    if not is_tensor(tensor):
        refuse_type(comm, operation, f"{type(tensor).__name__} is neither a tensor nor an array")


def refuse_out(comm: Communicator, operation: str, out: Any) -> None:
    """Refuse `out` beside a structure."""
    if out is not None:
        refuse_type(comm, operation, "out= is for tensors: it does not go with a structure")


def copy_of(tensor: Any) -> Any:
    """A contiguous copy without history."""
    if isinstance(tensor, _Tensor):
        return tensor.detach().clone(memory_format=torch.contiguous_format)
    return tensor.copy()


def copy_into(comm: Communicator, operation: str, out: Any, tensor: Any) -> Any:
    """`out`, with the elements of `tensor`."""
    if type(out) is not type(tensor) and not is_tensor(out):
        refuse_type(comm, operation, f"out is {type(out).__name__}, not a tensor or an array")
    check_out(comm, operation, out, tensor.dtype, tensor.shape)
    if isinstance(out, _Tensor):
        out.detach().copy_(tensor.detach())
    else:
        out[...] = tensor
    return out


def empty(like: Any, shape: Any) -> Any:
    """A tensor or array of the same kind and another shape."""
    if isinstance(like, _Tensor):
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    return numpy.empty(shape, like.dtype)


def part_shape(comm: Communicator, operation: str, tensor: Any) -> tuple[int, ...]:
    """The shape of a rank's part of a tensor that is cut along its first dimension."""
    check_tensor(comm, operation, tensor)
    shape = tuple(tensor.shape)
    if not shape or shape[0] % comm.size:
        comm.refuse(
            operation,
            f"a tensor of shape {shape} cannot be cut evenly for {comm.size} ranks: pass a list of "
            "tensors",
        )
    return (shape[0] // comm.size, *shape[1:])


def check_parts(comm: Communicator, operation: str, tensors: Any) -> None:
    """Refuse what is not a tensor for each rank, all of one dtype."""
    if len(tensors) != comm.size:
        comm.refuse(operation, f"{len(tensors)} tensors for {comm.size} ranks")
    for tensor in tensors:
        check_tensor(comm, operation, tensor)
    dtypes = sorted({str(tensor.dtype) for tensor in tensors})
    if len(dtypes) > 1:
        refuse_type(comm, operation, f"tensors of one call have one dtype, not {dtypes}")


def parts(comm: Communicator, operation: str, tensors: Any) -> list[torch.Tensor]:
    """One tensor for each rank."""
    if isinstance(tensors, (list, tuple)):
        check_parts(comm, operation, tensors)
        return [as_dense_tensor(comm, operation, tensor) for tensor in tensors]
    length = part_shape(comm, operation, tensors)[0]
    whole = as_dense_tensor(comm, operation, tensors)
    return [whole[rank * length : (rank + 1) * length] for rank in range(comm.size)]


def in_given_type(given: Any, result: Any) -> Any:
    """Arrays where arrays were given."""
    if not isinstance(given, numpy.ndarray) or result is None:
        return result
    if isinstance(result, ResultWork):
        return ResultWork(result, finish=lambda: in_given_type(given, result.wait()))
    if isinstance(result, list):
        return [tensor.numpy() for tensor in result]
    return result.numpy()
