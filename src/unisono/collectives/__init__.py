"""The primitives as plain functions for people, above the Communicator (docs/collectives.md).

primitives.py       all_reduce, all_gather, ..., send, recv
tensors.py          reduce_tensor, gather_tensor, broadcast_tensor
objects.py          broadcast_object, gather_object, all_gather_object
differentiable.py   the same with gradients
softmax.py, norms.py, moments.py    mathematics on sharded tensors
statistics.py       what these have in common: from a rank's shard to all ranks
ragged.py           tensors whose shapes only their owners know
structures.py, trees.py             dicts, lists and dataclasses of tensors
encoding.py         plain data as bytes
reductions.py, refusals.py, results.py   what op= means, saying no, works with results
"""

from unisono.requirements import require_torch

require_torch(__name__)

from unisono.collectives import differentiable

__all__ = ["differentiable"]
