"""training/agreement.py: ranks that start with different values end with the same."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import unisono
from unisono.training import all_ranks, any_rank, main_process_first, sync_seed

SIZES = [1, 2, 3, 4, 8]


@pytest.mark.ranks(SIZES)
def test_votes(comm: Any) -> None:
    for ballot in range(2**comm.size):
        flags = [bool(ballot >> rank & 1) for rank in range(comm.size)]
        assert any_rank(flags[comm.rank]) is any(flags)
        assert all_ranks(flags[comm.rank]) is all(flags)


@pytest.mark.ranks(3)
def test_a_part_of_the_world_agrees_alone(comm: Any) -> None:
    pair = comm.split([2, 0])
    if pair is not None:
        assert not any_rank(comm.rank == 1, pair)
        assert all_ranks(comm.rank != 1, pair)


def draws() -> list[float]:
    return [random.random(), float(numpy.random.rand()), float(torch.rand(()))]


@pytest.mark.ranks(SIZES)
def test_one_seed_for_all_generators_of_all_ranks(comm: Any) -> None:
    torch.manual_seed(comm.rank)  # different before
    seed = sync_seed()
    mine = draws()
    assert unisono.all_gather_object([seed, mine]) == [[seed, mine]] * comm.size
    assert sync_seed(seed + comm.rank) == seed  # rank 0's counts
    assert draws() == mine
    assert sync_seed() != seed


@pytest.mark.ranks(2)
def test_a_wide_seed_still_seeds_numpy(comm: Any) -> None:
    assert sync_seed(2**63 - 1) == 2**63 - 1
    expected = numpy.random.RandomState((2**63 - 1) % 2**32).rand()
    assert numpy.random.rand() == expected
    assert sync_seed(numpy.int64(5)) == 5


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, "x", True])
def test_a_bad_seed_of_rank_0_is_refused_everywhere(comm: Any, seed: Any) -> None:
    with pytest.raises(ValueError, match=r"rank 0's seed must be a whole number"):
        sync_seed(seed if comm.rank == 0 else 7)
    assert any_rank(True)  # the group goes on


@pytest.mark.ranks(SIZES)
def test_rank_0_is_done_before_the_others_begin(comm: Any, shared_tmp_path: Path) -> None:
    file = shared_tmp_path / "prepared"
    with main_process_first():
        if comm.rank == 0:
            assert not file.exists()
            file.write_text("done")
        assert file.read_text() == "done"
    comm.barrier()


@pytest.mark.ranks(SIZES)
def test_if_rank_0_fails_all_raise_and_go_on(comm: Any) -> None:
    began = []

    def prepare() -> None:
        began.append(comm.rank)
        raise FileNotFoundError("no corpus here")

    expected = FileNotFoundError if comm.rank == 0 else unisono.UnisonoError
    with pytest.raises(expected, match="no corpus here"), main_process_first():
        prepare()
    assert began == ([0] if comm.rank == 0 else [])
    assert any_rank(True)


@pytest.mark.ranks(2)
def test_if_another_rank_fails_rank_0_is_not_held_up(comm: Any) -> None:
    if comm.rank == 0:
        with main_process_first():
            pass
    else:
        with pytest.raises(KeyError), main_process_first():
            raise KeyError("mine alone")
    assert any_rank(True)


def test_in_one_process_without_a_world() -> None:
    assert any_rank(1)
    assert not all_ranks([])
    with main_process_first():
        assert sync_seed(3) == 3
