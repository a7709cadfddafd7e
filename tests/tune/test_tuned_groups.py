"""Groups use a table that all members have, and no table changes a bit of any result."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from tuning_tables import LARGE, SMALL, table, write_table
from unisono import Communicator, PremulSum
from unisono.comm import engine, tuning
from unisono.comm.mismatches import algorithm_mark
from unisono.comm.shared_memory.communicator import SharedMemoryCommunicator

ROOT = 4  # what stands there in a post


@pytest.fixture(autouse=True)
def _nothing_said_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_warned", set())
    monkeypatch.setenv("UNISONO_TUNING", "off")


def split(comm: Communicator, label: str = "") -> SharedMemoryCommunicator:
    group = comm.split(range(comm.size), label)
    assert isinstance(group, SharedMemoryCommunicator)
    return group


def tuned_group(
    comm: Communicator, folder: Path, patch: pytest.MonkeyPatch, sizes: dict[str, int], **more: Any
) -> SharedMemoryCommunicator:
    """A group of all ranks, each of which has a table of its own that says the same."""
    crowded = split(comm).is_crowded
    document = table(comm.size, crowded, sizes, **more)
    patch.setenv("UNISONO_TUNING", write_table(folder, document))
    return split(comm, "tuned")


# -- who uses it -------------------------------------------------------------------------------


@pytest.mark.ranks([2, 4])
def test_a_group_uses_the_table_that_all_ranks_have(
    comm: Communicator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain = split(comm)
    defaults = engine.default_tuning(comm.size, plain.is_crowded)
    assert tuple(plain.tuning.values()) == defaults
    assert not plain.is_tuned
    tuned = tuned_group(comm, tmp_path, monkeypatch, SMALL)
    assert tuned.tuning == SMALL
    assert tuned.is_tuned
    assert not caplog.records


@pytest.mark.ranks([2, 4])
@pytest.mark.parametrize("other", ["another", "none", "damaged"])
def test_ranks_with_different_tables_use_none_and_rank_0_says_so_once(
    comm: Communicator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    other: str,
) -> None:
    crowded = split(comm).is_crowded
    path = write_table(tmp_path, table(comm.size, crowded, SMALL))
    if comm.rank == comm.size - 1:
        different = {
            "another": table(comm.size, crowded, SMALL | {"cut_from": 4096}),
            "damaged": "{",
        }
        path = "off" if other == "none" else write_table(tmp_path, different[other])
    monkeypatch.setenv("UNISONO_TUNING", path)
    with caplog.at_level(logging.WARNING, "unisono"):
        groups = [split(comm, str(number)) for number in range(3)]
    for group in groups:
        assert tuple(group.tuning.values()) == engine.default_tuning(comm.size, crowded)
        x = torch.full((70_000,), float(comm.rank))
        group.all_reduce(x)
        assert x.eq(comm.size * (comm.size - 1) / 2).all()
    warned = [record.getMessage() for record in caplog.records]
    if comm.rank:
        assert not warned
    else:
        (text,) = warned
        assert f"rank {comm.size - 1}" in text
        assert "none is used" in text


@pytest.mark.ranks(2)
def test_a_table_for_another_number_of_cores_is_not_used(
    comm: Communicator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crowded = split(comm).is_crowded
    path = write_table(tmp_path, table(comm.size, not crowded, SMALL))
    monkeypatch.setenv("UNISONO_TUNING", path)
    group = split(comm)
    assert not group.is_tuned
    assert tuple(group.tuning.values()) == engine.default_tuning(comm.size, crowded)


# -- what it does not change -------------------------------------------------------------------


def tunings() -> Iterator[dict[str, int]]:
    """Both ends, and some in between."""
    yield SMALL
    yield LARGE
    chance = random.Random(20)
    for _ in range(2):
        yield {
            name: 64 * chance.randint(64, 4096)
            if name.endswith("_turn")
            else chance.choice([64, 1000, 5000, 33_333, 200_000, 1 << 40])
            for name in engine.TUNED
        }


def random_bits(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits: NaNs with their payloads, both zeros, infinities, numbers below the normal ones."""
    generator = numpy.random.default_rng(seed)
    data = generator.integers(0, 256, count * dtype.itemsize, numpy.uint8)
    return torch.from_numpy(data).view(dtype).clone()


def results(group: Communicator, count: int, dtype: torch.dtype, op: Any) -> list[bytes]:
    """What this rank has after every collective, as bytes."""
    rank, size = group.rank, group.size
    part = random_bits(count, dtype, rank)
    whole = random_bits(count * size, dtype, 100 + rank)
    reduced, kept, mine = whole.clone(), whole.clone(), torch.empty_like(part)
    gathered, exchanged = torch.empty_like(whole), torch.empty_like(whole)
    group.all_reduce(reduced, op)
    group.reduce(kept, size - 1, op)
    group.reduce_scatter(mine, whole, op)
    group.all_gather(gathered, part)
    group.all_to_all(exchanged, whole)
    sent = whole.clone()
    group.broadcast(sent, root=size - 1)
    on_root = torch.empty_like(whole) if rank == 0 else None
    group.gather(on_root, part, 0)
    scattered = torch.empty_like(part)
    group.scatter(scattered, whole if rank == 0 else None, 0)
    shared = group.empty(count * size, dtype)
    shared.copy_(whole)
    group.all_reduce(shared, op)
    tensors = [reduced, kept, mine, gathered, exchanged, sent, scattered, shared]
    tensors += [] if on_root is None else [on_root]
    return [tensor.view(torch.uint8).numpy().tobytes() for tensor in tensors]


@pytest.mark.ranks([2, 4])
@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        (torch.float32, "sum"),
        (torch.float32, "max"),
        (torch.bfloat16, "avg"),
        (torch.float16, PremulSum(0.3)),
        (torch.int8, "product"),
    ],
    ids=str,
)
def test_no_tuning_changes_a_bit(comm: Communicator, dtype: torch.dtype, op: Any) -> None:
    plain, tuned = split(comm), split(comm, "tuned")
    for count in (7, 30_001):
        expected = results(plain, count, dtype, op)
        for sizes in tunings():
            tuned.tune(sizes)
            assert tuned.tuning == sizes
            assert results(tuned, count, dtype, op) == expected, (count, sizes)


@pytest.mark.ranks(2)
def test_a_number_out_of_bounds_is_refused_and_changes_nothing(comm: Communicator) -> None:
    group = split(comm)
    before = group.tuning
    for name, (least, most, multiple) in tuning.LIMITS.items():
        for wild in (0, -1, least - multiple, most + multiple, (1 << 63) - 1):
            with pytest.raises(ValueError, match="bounds"):
                group.tune({name: wild})
    for turn in (5000, 65537):
        with pytest.raises(ValueError, match="bounds"):
            group.tune({"all_reduce_turn": turn})
    assert group.tuning == before
    with pytest.raises(OverflowError):
        group.tune({"cut_from": 1 << 70})


# -- algorithm="auto" ----------------------------------------------------------------------------


def steps(algorithm: str) -> dict[str, Any]:
    return {"all_reduce": [{"from_bytes": 4096, "algorithm": algorithm}]}


def algorithm_of_latest_call(group: SharedMemoryCommunicator) -> int:
    posted = group._group.posted(group.rank, group._group.calls)
    assert posted is not None
    return int(posted[ROOT])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_auto_takes_the_algorithm_of_the_table_and_the_bits_stay(
    comm: Communicator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    defaults = split(comm).tuning
    group = tuned_group(comm, tmp_path, monkeypatch, defaults, algorithms=steps("ring"))
    ring = algorithm_mark("ring")
    for op in ("sum", "product", "max", "min", "avg", PremulSum(0.3)):
        for count in (3, 100_003):
            given = random_bits(count, dtype, comm.rank)
            expected, got = given.clone(), given.clone()
            group.all_reduce(expected, op)
            group.all_reduce(got, op, algorithm="auto")
            is_rounded_once = dtype.itemsize == 2 and op not in ("sum", "product", "max", "min")
            is_ring = count > 3 and not is_rounded_once
            assert algorithm_of_latest_call(group) == (ring if is_ring else 0)
            assert got.view(torch.uint8).equal(expected.view(torch.uint8)), (op, count)
    several = [torch.ones(2000), torch.ones(3000)]
    group.all_reduce(several, algorithm="auto")
    assert algorithm_of_latest_call(group) == ring
    work = group.all_reduce(torch.ones(5000), algorithm="AUTO", async_op=True)
    assert work is not None
    work.wait()
    assert algorithm_of_latest_call(group) == ring


@pytest.mark.ranks(4)
def test_auto_keeps_rank_order_unless_reordering_is_allowed(
    comm: Communicator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = {"algorithms": steps("ring"), "algorithms_reordered": steps("binomial")}
    group = tuned_group(comm, tmp_path, monkeypatch, split(comm).tuning, **both)
    x = random_bits(5000, torch.float32, comm.rank)
    expected, got = x.clone(), x.clone()
    group.all_reduce(expected)
    group.all_reduce(got, algorithm="auto")
    assert algorithm_of_latest_call(group) == 0, "a ring of 4 does not add in rank order"
    assert got.view(torch.uint8).equal(expected.view(torch.uint8))
    group.allow_reorder = True
    ones = torch.ones(5000)
    group.all_reduce(ones, algorithm="auto")
    assert algorithm_of_latest_call(group) == algorithm_mark("binomial")
    assert ones.eq(4).all()
    group.all_reduce(ones[:100], algorithm="auto")
    assert algorithm_of_latest_call(group) == 0


@pytest.mark.ranks(2)
def test_auto_without_a_table_or_with_a_strange_name_is_the_engines_own_way(
    comm: Communicator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [comm, split(comm)]
    groups.append(tuned_group(comm, tmp_path, monkeypatch, SMALL, algorithms=steps("of_next_year")))
    for group in groups:
        x = torch.full((5000,), float(comm.rank + 1))
        group.all_reduce(x, algorithm="auto")
        group.broadcast(x, 1, algorithm="auto")
        gathered = torch.empty(10_000)
        group.all_gather(gathered, x, algorithm="auto")
        group.reduce_scatter(x, gathered, algorithm="auto")
        group.all_to_all(torch.empty(10_000), gathered, algorithm="auto")
        group.reduce(x, 0, algorithm="auto")
        assert x.eq(12 if comm.rank == 0 else 6).all()
