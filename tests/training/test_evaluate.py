"""training/evaluate.py: results and averages of uneven shards, compared with one process that has
all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler

from unisono.training import gather_in_order, mean_over_samples

SIZES = [1, 2, 3, 4, 8]


def truth(total: int) -> torch.Tensor:
    return torch.arange(total * 3, dtype=torch.float32).reshape(total, 3) ** 2


@pytest.mark.ranks(SIZES)
@pytest.mark.parametrize("total", [0, 1, 5, 16])
def test_shards_without_padding(comm: Any, total: int) -> None:
    mine = list(range(comm.rank, total, comm.size))
    for dst in range(comm.size):
        rows = gather_in_order(truth(total)[mine], mine, total, dst)
        texts = gather_in_order([f"sample {i}" for i in mine], torch.tensor(mine), total, dst)
        if comm.rank == dst:
            assert torch.equal(rows, truth(total))
            assert texts == [f"sample {i}" for i in range(total)]
        else:
            assert rows is None
            assert texts is None


@pytest.mark.ranks(SIZES)
def test_the_padding_of_torchs_sampler_is_dropped(comm: Any) -> None:
    total = 13
    data = range(total)
    sampler = DistributedSampler(data, comm.size, comm.rank, shuffle=True, seed=5)  # type: ignore
    mine = list(sampler)
    assert len(mine) * comm.size > total or comm.size == 1  # some occur twice
    rows = gather_in_order(truth(total)[mine], mine, total)
    if comm.rank == 0:
        assert torch.equal(rows, truth(total))


@pytest.mark.ranks([2, 4])
def test_of_duplicates_the_lowest_ranks_first_is_taken(comm: Any) -> None:
    found = gather_in_order([[comm.rank, 0], [comm.rank, 1]], [0, 0], 1)
    assert found == ([[0, 0]] if comm.rank == 0 else None)


@pytest.mark.ranks([2, 3])
@pytest.mark.parametrize("nothing", [[], torch.empty(0, 3)])
def test_a_rank_with_nothing_need_not_know_what_the_others_have(comm: Any, nothing: Any) -> None:
    last = comm.rank == comm.size - 1
    rows = gather_in_order(truth(4).long() if last else nothing, range(4) if last else [], 4)
    texts = gather_in_order(list("abcd") if last else nothing, range(4) if last else [], 4)
    if comm.rank == 0:
        assert torch.equal(rows, truth(4).long())
        assert texts == list("abcd")


@pytest.mark.ranks(3)
def test_a_part_of_the_world(comm: Any) -> None:
    pair = comm.split([2, 0])
    if pair is not None:
        found = gather_in_order([comm.rank], [pair.rank], 2, dst=1, group=pair)
        assert found == ([2, 0] if comm.rank == 0 else None)
        assert mean_over_samples({"x": comm.rank}, 1, pair) == {"x": 1.0}


@pytest.mark.ranks([1, 2, 4])
def test_what_makes_no_sense_raises_on_every_rank(comm: Any) -> None:
    mine = list(range(comm.rank, 9, comm.size))
    last = comm.rank == comm.size - 1
    with pytest.raises(ValueError, match=r"of 10 samples, number 9 has no result$"):
        gather_in_order(mine, mine, 10)
    with pytest.raises(ValueError, match=r"number 9 has no result, nor have 2 others"):
        gather_in_order(mine, mine, 12)
    with pytest.raises(ValueError, match="of 8 samples, number 8 is out of range"):
        gather_in_order(mine, mine, 8)
    with pytest.raises(ValueError, match=f"rank {comm.size - 1} has 1 results and"):
        gather_in_order(["x"] if last else mine, [*mine, 3] if last else mine, 9)
    if comm.size > 1:
        with pytest.raises(ValueError, match=r"rank 0 has a list, rank \d has a float32 tensor"):
            gather_in_order(torch.ones(len(mine)) if last else mine, mine, 9)
        with pytest.raises(ValueError, match="rank 0 passed total=9, rank"):
            gather_in_order(mine, mine, 10 if last else 9)
        with pytest.raises(ValueError, match="structures differ"):
            mean_over_samples({"f1" if last else "loss": 1.0}, 1)
    with pytest.raises(ValueError, match="has a sample"):
        mean_over_samples({"loss": 0.0}, 0)
    assert mean_over_samples({"loss": 1.0}, 1) == {"loss": 1.0}  # the group goes on


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("bad", [torch.tensor(1.0), 3])
def test_results_without_rows_are_refused(comm: Any, bad: Any) -> None:
    with pytest.raises(TypeError, match="takes a tensor with rows or a list"):
        gather_in_order(bad, [0], 1)
    with pytest.raises(TypeError, match="list of integer indices"):
        gather_in_order([1], [0.5], 1)
    with pytest.raises(TypeError, match="takes numbers"):
        mean_over_samples({"loss": torch.ones(2)}, 2)


@pytest.mark.ranks(SIZES)
def test_means_over_uneven_shards_are_those_of_one_process(comm: Any) -> None:
    losses = torch.linspace(0, 7, 37, dtype=torch.float64)
    cuts = [0, *sorted((rank * rank + 1) % 37 for rank in range(comm.size - 1)), 37]
    mine = losses[cuts[comm.rank] : cuts[comm.rank + 1]]
    sums = {"square": (mine**2).sum(), "loss": mine.sum()}
    if comm.rank % 2:
        sums = dict(reversed(sums.items()))  # the order of names does not matter
    found = mean_over_samples(sums, len(mine))
    assert found["loss"] == pytest.approx(float(losses.mean()), rel=1e-14)
    assert found["square"] == pytest.approx(float((losses**2).mean()), rel=1e-14)


def test_in_one_process_without_a_world() -> None:
    assert gather_in_order(["b", "a"], [1, 0], 2) == ["a", "b"]
    assert mean_over_samples({"loss": torch.tensor(3.0)}, 2) == {"loss": 1.5}
