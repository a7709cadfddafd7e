"""What autograd must know of tensors that are written, or made to last, behind its back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.autograd.graph import increment_version

# What stands behind torch's function takes half of its time.
mark_written: Callable[[Iterable[torch.Tensor]], None] = getattr(
    torch._C, "_increment_version", increment_version
)
"""Count a write to each of these tensors, so that backward raises where it needs what was there
before. Tensors made in inference mode have no such count, and are passed over."""


@contextlib.contextmanager
def outlasting_inference_mode() -> Iterator[None]:
    """For whatever makes tensors that are kept, or gives a tensor other memory: what is made in
    inference mode cannot be written to outside of it, nor have a gradient. Nothing is recorded for
    backward. A context manager and a decorator."""
    with torch.inference_mode(False), torch.no_grad():  # the former alone would turn that on
        yield
