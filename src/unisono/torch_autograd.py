"""What autograd must know of tensors that are written, or made to last, behind its back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import increment_version

# What stands behind torch's function takes half of its time.
mark_written: Callable[[Iterable[torch.Tensor]], None] = getattr(
    torch._C, "_increment_version", increment_version
)
"""Count a write to each of these tensors, so that backward raises where it needs what was there
before. Tensors made in inference mode have no such count, and are passed over."""

outlasting_inference_mode: Callable[[], Any] = partial(torch.inference_mode, False)
"""For what makes tensors that are kept: one made in inference mode could not be written to outside
of it, nor have a gradient. A context manager and a decorator."""
