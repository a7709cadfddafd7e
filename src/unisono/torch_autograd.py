"""What autograd must know about tensors that we write to, or keep, without its knowledge."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.autograd.graph import increment_version

# torch's internal function takes half of the public one's time.
mark_written: Callable[[Iterable[torch.Tensor]], None] = getattr(
    torch._C, "_increment_version", increment_version
)
"""Count a write to each of these tensors, so that backward raises if it needs the old values.
Tensors made in inference mode have no such counter, and are skipped."""


@contextlib.contextmanager
def outlasting_inference_mode() -> Iterator[None]:
    """For code that makes tensors to keep, or replaces a tensor's memory: tensors made in
    inference mode cannot be written to outside of it, nor have a gradient. Nothing is recorded
    for backward. A context manager and a decorator."""
    with torch.inference_mode(False), torch.no_grad():  # the former alone would enable gradients
        yield
