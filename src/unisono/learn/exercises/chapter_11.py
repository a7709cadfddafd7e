"""11. Weights for an engine"""

from collections.abc import Callable

import torch

from unisono import Communicator


def update(comm: Communicator, weights: torch.Tensor, load: Callable[[torch.Tensor], None]) -> bool:
    """Give the engines, ranks 1 and up, the weights of the trainer, rank 0: all engines or none.

    `weights` are the new ones on the trainer, and the ones in use on an engine. An engine passes
    what it has received to `load`, which raises ValueError if it does not fit. In that case no
    engine may change its weights. Return on every rank whether they changed.
    """
    raise NotImplementedError
