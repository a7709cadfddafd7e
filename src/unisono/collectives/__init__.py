"""The primitives as plain functions for people, above the Communicator (docs/collectives.md).

primitives.py       all_reduce, all_gather, ...
messages.py         send, recv, ...
tensors.py          reduce_tensor, gather_tensor, broadcast_tensor
objects.py          broadcast_object, gather_object, all_gather_object
shared.py           shared tensors: empty_shared, share, share_module, peer
differentiable.py   the same with gradients
softmax.py          softmax, log_softmax and logsumexp of sharded tensors
norms.py            norms of sharded tensors, and clipping by them
moments.py          sums, means and variances of sharded tensors
statistics.py       what these three have in common: from a rank's shard to all ranks
ragged.py           tensors whose shapes only their owners know
structures.py       dicts, lists and dataclasses of tensors
trees.py            takes them apart and puts them together again
encoding.py         plain data as bytes, without pickle
tensor_bytes.py     from tensors to bytes, and back
integers.py         a few integers from every rank
reductions.py       what op= means
arguments.py        what they are given, checked and taken apart; types.py: for type checkers
refusals.py         refusing arguments so that the other ranks hear of it
results.py          works that return a result
"""

from unisono.torch_support import require_torch

require_torch(__name__)

from unisono.collectives import differentiable

__all__ = ["differentiable"]
