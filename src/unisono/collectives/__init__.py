"""The primitives as plain functions, on top of the Communicator (docs/collectives.md).

primitives.py       all_reduce, all_gather, ...; reduce_tensor, gather_tensor, broadcast_tensor
messages.py         send, recv, ...
objects.py          broadcast_object, gather_object, all_gather_object
shared.py           shared tensors: share_tensor, share_module
differentiable.py   the same with gradients
structures.py       dicts, lists and dataclasses of tensors
ragged.py           tensors whose shapes differ from rank to rank
encoding.py         plain data as bytes, without pickle
arguments.py        checks of arguments, and the works that are returned
types.py            for type checkers
"""

from unisono.torch_support import require_torch

require_torch(__name__)

from unisono.collectives import differentiable

__all__ = ["differentiable"]
