"""What autograd must know about tensors that we write to, or keep, without its knowledge."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

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


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, move: Any, back: Any, *tensors: torch.Tensor) -> Any:
        ctx.back = back
        return move(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, None, *ctx.back(*gradients)


def linear(move: Callable[..., Any], back: Callable[..., Any], *tensors: torch.Tensor) -> Any:
    """`move(*tensors)`, a tensor or a tuple of them. `back` makes the tensors' gradients, a tuple,
    of those of the results; of what it calls, differentiable functions have second derivatives."""
    return _Linear.apply(move, back, *tensors)  # type: ignore[no-untyped-call]
