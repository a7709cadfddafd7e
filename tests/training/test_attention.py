"""Ring and tree attention: compared with attention over the whole sequence in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from expected import doubles
from unisono.comm.communicator import Communicator
from unisono.training.attention import ring_attention
from unisono.world.world import resolve

RANKS = [1, 2, 3, 4]
BATCH, HEADS, WIDTH = 2, 3, 5


def full(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any = None) -> torch.Tensor:
    """The textbook's formula, written out."""
    scores = torch.einsum("...qd,...kd->...qk", q, k) / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return torch.einsum("...qk,...kd->...qd", torch.softmax(scores, -1), v)


def lengths_of(size: int, kind: str) -> list[int]:
    if kind == "even":
        return [4] * size
    if kind == "one each":
        return [1] * size
    return [(3 * rank) % 5 + (rank == 0) * 2 for rank in range(size)]  # 2, 3, 1, 4


def check_ring(comm: Communicator, lengths: list[int], causal: bool) -> None:
    length = sum(lengths)
    whole = [doubles(seed, BATCH, HEADS, length, WIDTH).requires_grad_() for seed in (1, 2, 3)]
    mask = torch.ones(length, length, dtype=torch.bool).tril() if causal else None
    expected = full(*whole, mask)
    weights = doubles(4, *expected.shape)
    (expected * weights).sum().backward()
    begin = sum(lengths[: comm.rank])
    here = slice(begin, begin + lengths[comm.rank])
    mine = [row.detach()[:, :, here].clone().requires_grad_() for row in whole]
    got = ring_attention(*mine, comm, causal=causal)
    torch.testing.assert_close(got, expected[:, :, here])
    (got * weights[:, :, here]).sum().backward()
    for tensor, other in zip(mine, whole, strict=True):
        assert tensor.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(tensor.grad, other.grad[:, :, here])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["even", "one each", "uneven"])
@pytest.mark.ranks(RANKS)
def test_ring(comm: Communicator, kind: str, causal: bool) -> None:
    check_ring(comm, lengths_of(comm.size, kind), causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.ranks([2, 3])
def test_ring_with_an_empty_shard(comm: Communicator, causal: bool) -> None:
    for empty in range(comm.size):
        check_ring(comm, [3 * (rank != empty) for rank in range(comm.size)], causal)


@pytest.mark.ranks(3, backend="gloo")
def test_ring_on_gloo(process_group: Any) -> None:
    check_ring(resolve(), [4, 4, 4], causal=True)


@pytest.mark.ranks(2)
def test_ring_in_half_precision_and_with_large_scores(comm: Communicator) -> None:
    q, k, v = (doubles(seed, 8, WIDTH) for seed in (1, 2, 3))
    mine = [row.chunk(2)[comm.rank].bfloat16() for row in (q, k, v)]
    got = ring_attention(*mine)
    assert got.dtype is torch.bfloat16
    exact = full(*(row.bfloat16().double() for row in (q, k, v)))
    torch.testing.assert_close(got.double(), exact.chunk(2)[comm.rank], rtol=1e-2, atol=1e-2)
    huge = [row.chunk(2)[comm.rank] * scale for row, scale in ((q, 1e4), (k, 1e4), (v, 1))]
    expected = full(q * 1e4, k * 1e4, v).chunk(2)[comm.rank]
    torch.testing.assert_close(ring_attention(*huge), expected)


@pytest.mark.ranks(2)
def test_wrong_shapes(comm: Communicator) -> None:
    q = torch.ones(4, 3)
    with pytest.raises(ValueError, match="do not fit"):
        ring_attention(q, torch.ones(4, 2), q)
    with pytest.raises(ValueError, match="4 queries and 5 keys"):
        ring_attention(q, torch.ones(5, 3), torch.ones(5, 3))
    with pytest.raises(ValueError, match="positions and width"):
        ring_attention(q[0], q, q)


@pytest.mark.ranks([1, 3])
def test_what_is_not_a_number_stays_so(comm: Communicator) -> None:
    for wrong in (torch.nan, torch.inf):
        q = torch.ones(2, 3)
        k = torch.ones(2, 3)
        if comm.rank == comm.size - 1:
            k[1, 1] = wrong
        assert ring_attention(q, k, torch.ones(2, 3)).isnan().all()
