"""The collectives as operators of torch, for compiled programs (docs/operators.md).

in_place.py      `torch.ops.unisono.all_reduce_` and its kin: the engine runs them, without Python
general_path.py  what the engine leaves to Python: other tensors, other groups, and failures
functional.py    `torch.ops.unisono.all_reduce` and its kin: new results, with gradients

Importing this package registers them. `group` is a Communicator's `name`.

>>> import unisono.operators
>>> x = torch.ones(2)
>>> torch.ops.unisono.all_reduce_(x, comm.name)
>>> x
tensor([2., 2.])
"""

from unisono.torch_support import require_torch

require_torch(__name__)

from unisono.operators import functional, in_place

__all__: list[str] = []

_library = in_place.register()
functional.register(_library)
