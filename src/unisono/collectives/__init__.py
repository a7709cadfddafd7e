"""The primitives as plain functions for people, above the Communicator (docs/collectives.md).

primitives.py       all_reduce, all_gather, ...
messages.py         send, recv, ...
tensors.py          reduce_tensor, gather_tensor, broadcast_tensor
objects.py          broadcast_object, gather_object, all_gather_object
shared.py           shared tensors: empty_shared, share, share_module, peer
differentiable.py   the same with gradients
softmax.py          softmax, log_softmax and logsumexp of sharded tensors
statistics.py       sums, means, variances and norms of sharded tensors, and clipping by them
structures.py       dicts, lists and dataclasses of tensors; trees.py takes them apart
ragged.py           tensors whose shapes only their owners know
encoding.py         plain data as bytes, without pickle
arguments.py        what they are given, checked; torch_forms.py: calls as torch has them
results.py          works that return a result
types.py            for type checkers
"""

from unisono.torch_support import require_torch

require_torch(__name__)

from unisono.collectives import differentiable

__all__ = ["differentiable"]
