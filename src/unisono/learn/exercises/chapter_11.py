"""Chapter 11: every engine has the new weights, or every engine has the old ones."""

from collections.abc import Callable

import torch

from unisono import Communicator


def update(comm: Communicator, weights: torch.Tensor, load: Callable[[torch.Tensor], None]) -> bool:
    """Rank 0 is the trainer, the others are engines. Give every engine the trainer's weights.

    `weights` are the trainer's new ones there, and those in use on an engine. An engine passes what
    it has received to `load`, which raises ValueError if they do not fit; then no engine may change
    its weights. Return on every rank whether they were changed.
    """
    raise NotImplementedError
