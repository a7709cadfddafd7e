"""Mathematics on sharded tensors: equal to the same computation on the whole tensor."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import unisono
from expected import REDUCED, SPREAD
from unisono.comm.communicator import Communicator
from unisono.training import clip_grad_norm

RANKS = [1, 2, 3, 4, 8]
INF, NAN = math.inf, math.nan


def lengths(size: int, dim_length: int) -> list[int]:
    """Uneven shards; with two or more ranks, one of them is empty."""
    weights = [0 if size > 1 and rank == size // 2 else rank + 1 for rank in range(size)]
    parts = [dim_length * weight // sum(weights) for weight in weights]
    parts[-1] += dim_length - sum(parts)
    return parts


def shard(comm: Communicator, whole: torch.Tensor, dim: int) -> torch.Tensor:
    return whole.split(lengths(comm.size, whole.size(dim)), dim)[comm.rank]


def whole_tensor(dtype: torch.dtype, rows: int = 4, columns: int = 21) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return (torch.randn(rows, columns, generator=generator, dtype=torch.float64) * 4).to(dtype)


TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, what: object) -> None:
    tolerance = TOLERANCES[dtype]
    assert actual.dtype == dtype, what
    torch.testing.assert_close(
        actual,
        expected.to(dtype),
        rtol=tolerance,
        atol=tolerance,
        equal_nan=True,
        msg=lambda text: f"{what}: {text}",
    )


@pytest.mark.ranks(RANKS)
def test_sharded_is_as_unsharded(comm: Communicator) -> None:
    for dtype in TOLERANCES:
        for rows in (4, 3000):  # few rows are gathered, many are reduced
            whole = whole_tensor(dtype, rows)
            for dim, x in ((1, whole), (0, whole.t()), (-1, whole))[: 3 if rows == 4 else 1]:
                mine = shard(comm, x, dim)
                for name, (ours, theirs) in SPREAD.items():
                    expected = shard(comm, theirs(x, dim), dim)
                    close(ours(mine, dim, comm), expected, dtype, (name, rows, dim))
                for name, (ours, theirs) in REDUCED.items():
                    close(ours(mine, dim, comm), theirs(x, dim), dtype, (name, rows, dim))
                    kept = ours(mine, dim, comm, keepdim=True)
                    assert kept.shape == theirs(x, dim).unsqueeze(dim).shape


@pytest.mark.ranks(RANKS)
def test_element_by_element_over_the_ranks(comm: Communicator) -> None:
    for count in (6, 20_000):
        stacked = torch.stack([whole_tensor(torch.float64, 2, count) * r for r in range(comm.size)])
        mine = stacked[comm.rank]
        for name, (ours, theirs) in SPREAD.items():
            expected = theirs(stacked, 0)[comm.rank]
            close(ours(mine, group=comm), expected, torch.float64, (name, count))
        for name, (ours, theirs) in REDUCED.items():
            if name == "variance" and comm.size == 1:
                assert ours(mine, group=comm).isnan().all()
                continue
            expected = theirs(stacked, 0)
            close(ours(mine, group=comm), expected, torch.float64, (name, count))


SPECIAL = {
    "all -inf": [-INF] * 9,
    "+inf": [1, INF, 2, -INF, 0, 3, 4, 5, 6],
    "two infinities": [INF, 1, 2, 3, 4, 5, 6, 7, INF],
    "a shard of -inf": [-INF] * 5 + [-1000.0, -1001, -1002, -1003],
    "nan": [1, 2, 3, 4, NAN, 5, 6, 7, 8],
    "large": [3e30, -3e30, 1e30, 0, 2e30, 1, 2, 3, 3e30],
    "very negative": [-1e30, -2e30, -1e30, -1e30, -3e30, -1e30, -1e30, -1e30, -1e30],
    "zeros": [0.0] * 9,
    "small": [1e-30] * 9,
}


@pytest.mark.parametrize("rows", [1, 3000])
@pytest.mark.ranks([1, 2, 3, 4])
def test_infinities_nans_and_large_numbers(comm: Communicator, rows: int) -> None:
    for what, numbers in SPECIAL.items():
        whole = torch.tensor([numbers] * rows)
        mine = shard(comm, whole, 1)
        for name in ("softmax", "log_softmax"):
            ours, theirs = SPREAD[name]
            expected = shard(comm, theirs(whole, 1), 1)
            close(ours(mine, 1, comm), expected, torch.float32, (what, name))
        for name, (ours, theirs) in REDUCED.items():
            # in 64 bits, because torch's own norms and variances overflow in 32 here
            expected = theirs(whole.double(), 1).float()
            if what == "large" and name == "variance":
                continue  # its square exceeds float32, and so do those of local shards
            close(ours(mine, 1, comm), expected, torch.float32, (what, name))


@pytest.mark.ranks([1, 2, 4])
def test_nothing_at_all(comm: Communicator) -> None:
    x = torch.empty(3, 0)
    assert unisono.math.softmax(x, 1).shape == (3, 0)
    assert unisono.math.logsumexp(x, 1).tolist() == [-INF] * 3
    assert unisono.math.l2_norm(x, 1).tolist() == [0] * 3
    assert unisono.math.mean(x, 1).isnan().all()
    assert unisono.math.variance(x, 1).isnan().all()
    assert unisono.math.logsumexp(torch.empty(0, 5), 1).shape == (0,)


@pytest.mark.ranks([1, 2, 3, 4])
def test_the_course_s_numbers(comm: Communicator) -> None:
    """Rank r has [r+1, r+2, r+3]."""
    x = torch.arange(1.0, 4) + comm.rank
    ranks = range(comm.size)
    weights = torch.tensor([0.3, 0.3, 0.4])
    rows = [[r + 1.0, r + 2.0, r + 3.0] for r in ranks]
    columns = list(zip(*rows, strict=True))
    summed = [sum(column) * w for column, w in zip(columns, weights.tolist(), strict=True)]
    assert unisono.math.weighted_sum(x, weights).tolist() == pytest.approx(summed)
    exponentials = [math.exp(r) for r in ranks]
    softmax = exponentials[comm.rank] / sum(exponentials)
    assert unisono.math.softmax(x).tolist() == pytest.approx([softmax] * 3)
    norms = [math.sqrt(sum(element**2 for element in column)) for column in columns]
    assert unisono.math.l2_norm(x).tolist() == pytest.approx(norms)
    normalized = [element / norm for element, norm in zip(x.tolist(), norms, strict=True)]
    assert unisono.math.normalize(x).tolist() == pytest.approx(normalized)
    if comm.size == 4:
        assert unisono.math.weighted_sum(x, weights).tolist() == pytest.approx([3.0, 4.2, 7.2])
        assert unisono.math.l2_norm(x).tolist() == pytest.approx([30**0.5, 54**0.5, 86**0.5])


@pytest.mark.ranks([1, 3])
def test_weighted_sums_of_shards(comm: Communicator) -> None:
    whole, weight = whole_tensor(torch.float64), whole_tensor(torch.float64, 1).squeeze(0)
    mine = unisono.math.weighted_sum(shard(comm, whole, 1), shard(comm, weight, 0), 1)
    torch.testing.assert_close(mine, whole @ weight)
    assert (
        unisono.math.weighted_sum(torch.ones(2), comm.rank + 1).tolist()
        == [comm.size * (comm.size + 1) / 2] * 2
    )


@pytest.mark.ranks([1, 2])
def test_complex_norms_and_means(comm: Communicator) -> None:
    x = torch.tensor([3 + 4j, 1j]) * (comm.rank + 1)
    factor = sum((r + 1) ** 2 for r in range(comm.size)) ** 0.5
    assert unisono.math.l2_norm(x, 0).item() == pytest.approx(26**0.5 * factor)
    assert unisono.math.mean(x, 0).item() == pytest.approx((1.5 + 2.5j) * (comm.size + 1) / 2)


@pytest.mark.ranks([1, 2])
def test_what_has_no_fractions_or_no_such_dimension_is_refused(comm: Communicator) -> None:
    for ours, _ in (SPREAD | REDUCED).values():
        with pytest.raises(TypeError, match=r"x\.float\(\)"):
            ours(torch.ones(2, dtype=torch.int64), 0)
        with pytest.raises(TypeError, match="list"):
            ours([1.0], 0)
        with pytest.raises(ValueError, match="dim=2"):
            ours(torch.ones(2, 2), 2)
    with pytest.raises(TypeError, match=r"variance of torch\.complex64"):
        unisono.math.variance(torch.ones(2, dtype=torch.complex64))


# -- gradient norms ----------------------------------------------------------------------------


def parameters(rank: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    made = []
    for i in range(rank + 1):
        parameter = torch.nn.Parameter(torch.zeros(i + 2, 3, dtype=dtype))
        parameter.grad = torch.full_like(parameter, float(i + rank - 1))
        made.append(parameter)
    return [*made, torch.nn.Parameter(torch.zeros(2))]  # the last one has no gradient


@pytest.mark.parametrize("order", [1.0, 2.0, INF])
@pytest.mark.ranks([1, 2, 3, 4])
def test_clipping_by_the_norm_of_all_shards(comm: Communicator, order: float) -> None:
    mine = parameters(comm.rank)
    everyone = [parameter for rank in range(comm.size) for parameter in parameters(rank)]
    expected = torch.nn.utils.clip_grad_norm_(everyone, 0.5, order)
    norm = clip_grad_norm(mine, 0.5, comm, norm_type=order)
    assert norm.item() == pytest.approx(expected.item())
    before = sum(rank + 2 for rank in range(comm.rank))
    for ours, theirs in zip(mine[:-1], everyone[before:], strict=False):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.ranks([2, 3])
def test_clipping_edges(comm: Communicator) -> None:
    assert clip_grad_norm([], 1.0).item() == 0
    alone = parameters(1)[0] if comm.rank == 0 else torch.nn.Parameter(torch.zeros(1))
    if comm.rank == 0:
        alone.grad = torch.full((2, 3), 60_000.0, dtype=torch.float16).to(torch.float32)
    norm: Any = clip_grad_norm(alone, 1e9)
    assert norm.item() == pytest.approx(60_000 * 6**0.5)
    half = torch.nn.Parameter(torch.zeros(6, dtype=torch.float16))
    half.grad = torch.full((6,), 60_000.0, dtype=torch.float16)
    expected = 60_000 * (6 * comm.size) ** 0.5  # exceeds float16
    assert clip_grad_norm([half], 1.0).item() == pytest.approx(expected, rel=1e-3)
    assert 0 < half.grad.abs().max() < 1
    half.grad.fill_(NAN)
    with pytest.raises(RuntimeError, match="is nan"):
        clip_grad_norm([half], 1.0, error_if_nonfinite=True)
