"""Attention over the whole sequence in one process, in float64: what sharded attention must
equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from expected import doubles

BATCH, WIDTH = 2, 5
TOLERANCES: dict[torch.dtype, dict[str, float]] = {
    torch.float64: {"rtol": 1e-9, "atol": 1e-9},
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.bfloat16: {"rtol": 5e-2, "atol": 5e-2},
}


def full(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any = None) -> torch.Tensor:
    """The textbook's formula, written out."""
    scores = torch.einsum("...qd,...kd->...qk", q, k) / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return torch.einsum("...qk,...kd->...qd", torch.softmax(scores, -1), v)


def check(
    attend: Callable[..., torch.Tensor],
    mine: torch.Tensor,
    length: int,
    *,
    causal: bool,
    heads: int = 3,
    key_heads: int | None = None,
    value_width: int = WIDTH,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> None:
    """`attend` on the positions `mine` of a sequence has the results and gradients of plain
    attention there."""
    key_heads = key_heads or heads
    shapes = ((heads, WIDTH), (key_heads, WIDTH), (key_heads, value_width))
    whole = [
        doubles(seed, BATCH, count, length, width).to(dtype).double().requires_grad_()
        for seed, (count, width) in enumerate(shapes, 1)
    ]
    mask = torch.ones(length, length, dtype=torch.bool).tril() if causal else None
    share = heads // key_heads
    query, key, value = whole
    expected = full(query, key.repeat_interleave(share, 1), value.repeat_interleave(share, 1), mask)
    weights = doubles(4, *expected.shape).to(dtype).double()
    (expected * weights).sum().backward()
    parts = [
        row.detach()[:, :, mine].to(device=device, dtype=dtype).requires_grad_() for row in whole
    ]
    got = attend(*parts)
    assert got.dtype is dtype
    assert got.device.type == device
    near = TOLERANCES[dtype]
    torch.testing.assert_close(got.double().cpu(), expected.detach()[:, :, mine], **near)
    (got * weights[:, :, mine].to(got)).sum().backward()
    for name, part, other in zip(("query", "key", "value"), parts, whole, strict=True):
        assert part.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(
            part.grad.double().cpu(),
            other.grad[:, :, mine],
            **near,
            msg=lambda text, name=name: f"the gradient of {name}: {text}",
        )


def zigzag(length: int, rank: int, size: int) -> torch.Tensor:
    """The positions of a rank: one early and one late part, out of twice as many parts as ranks."""
    parts = torch.arange(length).tensor_split(2 * size)
    return torch.cat([parts[rank], parts[2 * size - 1 - rank]])
