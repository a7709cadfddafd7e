"""From tensors to bytes, and back."""

from __future__ import annotations

from typing import Any

import torch


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as a row of bytes: in the same memory where the tensor is contiguous, else in
    a copy."""
    row = tensor.detach().resolve_conj().resolve_neg().contiguous().flatten()
    # The stride of no or one element may be anything, and view() wants 1.
    return row.as_strided(row.shape, (1,)).view(torch.uint8)


def tensor_from_bytes(data: bytearray, device: Any) -> torch.Tensor:
    """A row of these bytes: on the CPU in the same memory."""
    if not data:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return torch.frombuffer(data, dtype=torch.uint8).to(device)


def bytes_of(row: torch.Tensor) -> memoryview:
    """The bytes of a row: of one on the CPU in the same memory."""
    return row.cpu().numpy().data
