"""Tensors and modules moved into memory that all ranks of a group have mapped (docs/shared.md)."""

from __future__ import annotations

from itertools import chain
from typing import Any, TypeVar

import numpy
import torch

from unisono.collectives.types import Group, TensorT
from unisono.comm.shared_tensors import check_shareable
from unisono.torch_autograd import outlasting_inference_mode
from unisono.world.world import resolve, well_formed

ModuleT = TypeVar("ModuleT", bound=torch.nn.Module)
_LINE_BYTES = 64


@well_formed
def share_tensor(tensor: TensorT, group: Group = None) -> TensorT:
    """A copy of `tensor`, a CPU tensor or array, in memory that every rank of `group` (None: the
    world) has mapped. All ranks call it, each with its own. The copy is contiguous and detached
    from autograd's graph.

    Raises TypeError for any other tensor, and what `Communicator.empty` raises.
    Cost: an allocation by all ranks, and a copy. See also `share_module`.

    >>> x = unisono.share_tensor(torch.arange(3) + comm.rank)
    >>> comm.barrier()
    >>> comm.get_peer_tensor(x, 1)
    tensor([1, 2, 3])
    """
    comm = resolve(group)
    given: Any = check_shareable(comm, tensor)
    made = comm.empty(tuple(given.shape), given.dtype)
    if isinstance(given, numpy.ndarray):
        made[...] = given
    else:
        made.copy_(given.detach())
    result: TensorT = made
    return result


@outlasting_inference_mode()
@well_formed
def share_module(module: ModuleT, group: Group = None) -> ModuleT:
    """Move the parameters and buffers of a `module` into memory that every rank of `group` (None:
    the world) has mapped; returns the module. All ranks call it, each with its own.

    The tensors stay the same objects, so that optimizers and hooks keep working; tied tensors stay
    tied. Everything goes into one allocation.

    Raises TypeError for parameters or buffers that are not dense CPU tensors, and what
    `Communicator.empty` raises.
    Cost: an allocation by all ranks, and a copy. See also `share_tensor`, `broadcast`.

    >>> layer = unisono.share_module(torch.nn.Linear(2, 1))
    >>> comm.is_shared(layer.weight)
    True
    >>> comm.barrier()
    >>> comm.get_peer_tensor(layer.bias.detach(), comm.next).shape
    torch.Size([1])
    """
    comm = resolve(group)
    tensors = [check_shareable(comm, each) for each in chain(module.parameters(), module.buffers())]
    starts: dict[int, int] = {}
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in starts:
            starts[storage.data_ptr()] = total
            total += -(-storage.nbytes() // _LINE_BYTES) * _LINE_BYTES
    memory = comm.empty(total, torch.uint8)
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            continue
        start = starts[storage.data_ptr()]
        there = memory[start : start + storage.nbytes()]
        there.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
        offset = (memory.storage_offset() + start) // tensor.element_size()
        where = offset + tensor.storage_offset(), tensor.shape, tensor.stride()
        with torch.inference_mode(tensor.is_inference()):  # an inference tensor stays one
            moved = torch.empty(0, dtype=tensor.dtype)
            tensor.data = moved.set_(memory.untyped_storage(), *where)
    return module
