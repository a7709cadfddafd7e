"""Tree attention: compared with attention over the whole cache in one process, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from expected import doubles
from plain_attention import TOLERANCES, WIDTH, full
from unisono import CollectiveMismatch
from unisono.comm.communicator import Communicator
from unisono.training import ring_attention, tree_attention
from unisono.world.world import resolve

RANKS = [1, 2, 3, 4, 8]
NEAR = TOLERANCES | {torch.float16: {"rtol": 1e-2, "atol": 1e-2}}


def lengths_of(size: int, kind: str) -> list[int]:
    """The keys of each rank."""
    if kind == "even":
        return [4] * size
    if kind == "one rank has all":
        return [7 * (rank == size - 1) for rank in range(size)]
    return [(3 * rank + 2) % 5 for rank in range(size)]  # 2, 0, 3, 1, 4, ...


def check(
    comm: Communicator,
    lengths: list[int],
    *,
    dtype: torch.dtype = torch.float64,
    queries: int = 1,
    heads: int = 3,
    key_heads: int = 3,
    value_width: int = WIDTH,
    factor: float = 1.0,
) -> None:
    q = doubles(1, 2, heads, queries, WIDTH).mul(factor).to(dtype)
    k = doubles(2, 2, key_heads, sum(lengths), WIDTH).mul(factor).to(dtype)
    v = doubles(3, 2, key_heads, sum(lengths), value_width).to(dtype)
    share = heads // key_heads
    wide = (q, k.repeat_interleave(share, 1), v.repeat_interleave(share, 1))
    expected = full(*(x.double() for x in wide))
    mine = (x.split(lengths, dim=2)[comm.rank] for x in (k, v))
    got = tree_attention(q, *mine, comm)
    assert got.dtype is dtype
    assert got.shape == expected.shape
    torch.testing.assert_close(got.double(), expected, **NEAR[dtype])
    everyone = torch.empty(comm.size, *got.shape, dtype=dtype)
    comm.all_gather(everyone, got)
    assert all(torch.equal(theirs, got) for theirs in everyone)


@pytest.mark.parametrize("kind", ["even", "uneven", "one rank has all"])
@pytest.mark.ranks(RANKS)
def test_one_query(comm: Communicator, kind: str) -> None:
    check(comm, lengths_of(comm.size, kind))
    check(comm, lengths_of(comm.size, kind), queries=3, value_width=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.ranks([1, 4])
def test_other_precisions(comm: Communicator, dtype: torch.dtype) -> None:
    check(comm, lengths_of(comm.size, "uneven"), dtype=dtype)
    check(comm, lengths_of(comm.size, "even"), dtype=dtype, heads=6, key_heads=2)


@pytest.mark.ranks([1, 3])
def test_heads_that_share_keys(comm: Communicator) -> None:
    for key_heads in (1, 2, 6):
        check(comm, lengths_of(comm.size, "uneven"), heads=6, key_heads=key_heads, queries=2)


@pytest.mark.ranks(2)
def test_scores_that_overflow_without_the_maximum(comm: Communicator) -> None:
    check(comm, [3, 5], factor=1e3)


@pytest.mark.ranks([2, 3])
def test_without_heads_and_with_a_scale(comm: Communicator) -> None:
    q, k, v = doubles(1, 1, WIDTH), doubles(2, 6, WIDTH), doubles(3, 6, WIDTH)
    mine = [x.tensor_split(comm.size)[comm.rank] for x in (k, v)]
    expected = full(q * 0.5 * WIDTH**0.5, k, v)
    torch.testing.assert_close(tree_attention(q, *mine, comm, scale=0.5), expected)


@pytest.mark.ranks(2)
def test_in_inference_mode(comm: Communicator) -> None:
    with torch.inference_mode():
        check(comm, [2, 3])


@pytest.mark.ranks(2, backend="gloo")
def test_on_gloo(process_group: Any) -> None:
    check(resolve(), [4, 0])


@pytest.mark.ranks(4)
def test_on_a_subgroup(comm: Communicator) -> None:
    half = comm.split([3, 1])
    if half is not None:
        check(half, [2, 5])


@pytest.mark.ranks([1, 3])
def test_what_is_not_a_number_stays_so(comm: Communicator) -> None:
    for wrong in (torch.nan, torch.inf):
        k = torch.ones(2, 3)
        if comm.rank == comm.size - 1:
            k[1, 1] = wrong
        assert tree_attention(torch.ones(1, 3), k, torch.ones(2, 3), comm).isnan().all()
    lost = torch.full((1, 3), torch.nan)
    assert tree_attention(lost, torch.ones(2, 3), torch.ones(2, 3), comm).isnan().all()


@pytest.mark.ranks([2, 3])
def test_every_rank_raises_if_queries_scales_or_keys_are_wrong(comm: Communicator) -> None:
    q, k = torch.ones(1, 3), torch.ones(2, 3)
    last = comm.rank == comm.size - 1
    with pytest.raises(ValueError, match=r"different queries or scales.* use ring_attention"):
        tree_attention(q * 2 if last else q, k, k, comm)
    with pytest.raises(ValueError, match="different queries or scales"):
        tree_attention(q, k, k, comm, scale=2.0 if last else None)
    with pytest.raises(ValueError, match=r"no rank of group .* passed a key"):
        tree_attention(q, k[:0], k[:0], comm)
    assert torch.equal(tree_attention(q, k, k, comm), q)  # the group still works


@pytest.mark.ranks(2)
def test_arguments_that_do_not_fit(comm: Communicator) -> None:
    q, k = torch.ones(1, 3), torch.ones(4, 3)
    with pytest.raises(ValueError, match="do not fit"):
        tree_attention(q, torch.ones(4, 2), k, comm)
    with pytest.raises(ValueError, match="do not fit"):
        tree_attention(torch.ones(3, 1, 3), torch.ones(2, 4, 3), torch.ones(2, 4, 3), comm)
    with pytest.raises(ValueError, match="one floating-point dtype, not float32, float64, float32"):
        tree_attention(q, k.double(), k, comm)
    with pytest.raises(ValueError, match="no gradients: call it under"):
        tree_attention(q.requires_grad_(), k, k, comm)
    with torch.no_grad():
        assert torch.equal(tree_attention(q, k, k, comm), torch.ones(1, 3))


@pytest.mark.ranks(2)
def test_the_peers_of_a_refused_call_raise_at_once(comm: Communicator) -> None:
    half = comm.split([0, 1])
    assert half is not None
    q, k = torch.ones(1, 3), torch.ones(4, 3)
    with pytest.raises(ValueError if comm.rank else CollectiveMismatch, match="do not fit"):
        tree_attention(q, k[:, :2] if comm.rank else k, k, half)


@pytest.mark.ranks(2)
def test_a_ring_with_one_query_names_the_function_to_use(comm: Communicator) -> None:
    q, k = torch.ones(1, 3), torch.ones(4, 3)
    with pytest.raises(ValueError, match=r"use unisono\.training\.tree_attention"):
        ring_attention(q, k, k, comm)
