"""What autograd must know about tensors that are written, or kept, without its knowledge."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.autograd.graph import increment_version

# The function behind torch's takes half the time.
mark_written: Callable[[Iterable[torch.Tensor]], None] = getattr(
    torch._C, "_increment_version", increment_version
)
"""Count a write to each of these tensors, so that backward raises if it needs the old values.
Tensors made in inference mode have no such counter and are skipped."""


@contextlib.contextmanager
def outlasting_inference_mode() -> Iterator[None]:
    """For whatever makes tensors that are kept, or gives a tensor other memory: what is made in
    inference mode cannot be written to outside of it, nor have a gradient. Nothing is recorded for
    backward. A context manager and a decorator."""
    with torch.inference_mode(False), torch.no_grad():  # the former alone would turn that on
        yield
