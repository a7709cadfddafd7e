"""A tensor's elements as bytes."""

from __future__ import annotations

import torch


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as a row of bytes: in the same memory where the tensor is contiguous, else in
    a copy."""
    row = tensor.detach().resolve_conj().resolve_neg().contiguous().flatten()
    # The stride of no or one element may be anything, and view() wants 1.
    return row.as_strided(row.shape, (1,)).view(torch.uint8)
