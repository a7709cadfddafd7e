"""Weight updates between hosts that send only changes: the same bits, and all or none."""

from __future__ import annotations

import logging
import os
import signal
from typing import Any

import pytest
import torch
from host_jobs import Places, places, world
from namespaces import Link, MakeNetwork

from ranks import RankPool, attempt
from unisono.errors import WeightUpdateError
from unisono.training import WeightReceiver, WeightSender, WeightShard

ROWS, COLUMNS, LAYERS = 512, 1024, 12
SLOW = Link(rate_bits_per_s=200_000_000)
DTYPES = torch.bfloat16, torch.float32, torch.int64, torch.uint8, torch.complex128
BUCKET = 3 << 20


def whole_weights(version: int) -> dict[str, torch.Tensor]:
    """A trainer's weights at a version, which every rank can compute: a few elements change."""
    weights = {}
    for layer in range(LAYERS):
        made = torch.Generator().manual_seed(layer)
        dtype = DTYPES[layer % 5] if layer < 5 else torch.bfloat16
        numbers = torch.randint(0, 100, (ROWS, COLUMNS), generator=made)
        for _ in range(version):
            where = torch.randint(0, ROWS * COLUMNS, (ROWS * COLUMNS // 100,), generator=made)
            numbers.view(-1)[where] += 1
        weights[f"layer.{layer}"] = numbers.to(dtype)
    weights["norm"] = torch.full((7,), float(version))
    weights["none"] = torch.empty(0)
    return weights


def shard_of(weights: dict[str, torch.Tensor], part: int, parts: int) -> dict[str, Any]:
    """Every second layer is split by columns, the others by rows; small ones are whole."""
    held: dict[str, Any] = {}
    for number, (name, whole) in enumerate(weights.items()):
        if whole.dim() == 1:
            held[name] = whole.clone()
            continue
        dim = number % 2
        mine = whole.chunk(parts, dim)[part].clone()
        offset = [0, 0]
        offset[dim] = part * mine.shape[dim]
        held[name] = WeightShard(mine, tuple(whole.shape), tuple(offset))
    return held


def local(value: Any) -> torch.Tensor:
    return value.tensor if isinstance(value, WeightShard) else value


def differing(held: dict[str, Any], version: int, part: int, parts: int) -> list[str]:
    right = shard_of(whole_weights(version), part, parts)
    return [
        name
        for name, value in held.items()
        if not torch.equal(local(value).view(torch.uint8), local(right[name]).view(torch.uint8))
    ]


class Said(logging.Handler):
    """What unisono has logged on this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("unisono").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def update_often(rank: int, size: int, path: str, where: Places, reuse: bool) -> Any:
    """Rank 0 sends six versions to engines of `size` - 1 ranks on the other host."""
    said, parts, stories = Said(), size - 1, []
    with world(rank, where) as comm:
        if rank == 0:
            weights = whole_weights(0)
            with WeightSender(comm, weights, bucket_bytes=BUCKET) as sender:
                for version in range(1, 7):
                    for name, tensor in whole_weights(version).items():
                        weights[name].copy_(tensor)
                    update = sender.update()
                    stories.append((update.delta_bytes, update.snapshot_bytes, update.bytes))
            return stories, said.lines
        held = shard_of(whole_weights(0), rank - 1, parts)
        loaded: dict[str, torch.Tensor] = {}

        def load(new: dict[str, torch.Tensor]) -> None:
            loaded.update({name: tensor.clone() for name, tensor in new.items()})

        options: dict[str, Any] = {"commit": load, "reuse": True} if reuse else {}
        with WeightReceiver(comm, held, **options) as receiver:
            for version in range(1, 7):
                if version == 4 and rank == 1:
                    receiver.version = 77  # from an engine that has loaded something else
                if version == 6 and rank == 1:  # an engine that has written to its weights
                    staged: Any = receiver._staging.tensors["layer.7"]
                    (staged if reuse else local(held["layer.7"])).view(-1)[5] += 1
                update = receiver.update()
                if reuse:
                    for name, tensor in loaded.items():
                        local(held[name]).copy_(tensor)
                stories.append((update.delta_bytes, differing(held, version, rank - 1, parts)))
    return stories, said.lines


@pytest.mark.parametrize("reuse", [False, True], ids=["swap", "commit"])
@pytest.mark.parametrize("engines", [1, 2])
def test_bits_are_equal_after_deltas(
    fresh_pool: RankPool, make_network: MakeNetwork, engines: int, reuse: bool
) -> None:
    """Everything at first, then only changes; everything again if a version or a checksum differs,
    logged once."""
    with make_network(2, SLOW) as made:
        where = places(made, (0, *[1] * engines))
        sent, *received = fresh_pool.run(
            update_often, 1 + engines, where, reuse, connected=False, deadline_s=300
        )
    stories, said = sent
    all_bytes = stories[0][2]
    deltas = [delta for delta, _, _ in stories]
    assert [delta > 0 for delta in deltas] == [False, True, True, False, True, False]
    assert all(delta < all_bytes / 20 for delta in deltas)
    assert all(snapshot == all_bytes for _, snapshot, _ in stories)
    assert len(said) == 1, said
    assert "sending all weights instead of the changes: rank 1 did not hold" in said[0]
    for number, (theirs, lines) in enumerate(received):
        assert not lines
        assert [wrong for _, wrong in theirs] == [[]] * 6, number


def update_apart(rank: int, size: int, path: str, where: Places, deltas: bool) -> Any:
    """Engines on the trainer's host and on the other host, each in their own transfers."""
    with world(rank, where) as comm:
        weights = whole_weights(0)
        if rank == 0:
            with WeightSender(comm, weights, bucket_bytes=BUCKET, deltas=deltas) as sender:
                updates = [sender.update()]
                weights["norm"] += 1
                updates.append(sender.update())
            return updates[1].delta_bytes, updates[1].snapshot_bytes, updates[1].bytes
        held = {name: value for name, value in weights.items() if (name < "layer.5") == (rank == 1)}
        with WeightReceiver(comm, held, partial=True) as receiver:
            updates = [receiver.update() for _ in range(2)]
        return updates[1].delta_bytes, updates[1].bytes


def test_never_inside_a_host_and_where_declined(
    fresh_pool: RankPool, make_network: MakeNetwork
) -> None:
    with make_network(2, SLOW) as made:
        where = places(made, (0, 0, 1))
        run: dict[str, Any] = {"connected": False, "deadline_s": 120.0}
        wanted = fresh_pool.run(update_apart, 3, where, True, **run)
        declined = fresh_pool.run(update_apart, 3, where, False, **run)
    (sent, snapshot_bytes, all_bytes), (beside, beside_bytes), (away, away_bytes) = wanted
    assert 0 == beside < away == sent < 100
    assert snapshot_bytes == away_bytes == all_bytes - beside_bytes
    assert [row[0] for row in declined] == [0, 0, 0]
    assert declined[0][1] == 0


def be_killed_in_a_delta(rank: int, size: int, path: str, where: Places, after: int) -> Any:
    """One of two engines dies in the middle of the third update."""
    with world(rank, where) as comm:

        def die(done: int, total: int) -> None:
            if version == 3 and done > after * total // 4:
                os.kill(os.getpid(), signal.SIGKILL)

        weights: dict[str, Any] = whole_weights(0)
        engine: Any
        if rank == 0:
            engine = WeightSender(comm, weights, bucket_bytes=BUCKET)
        else:
            weights = shard_of(weights, rank - 1, 2)
            engine = WeightReceiver(comm, weights, progress=die if rank == 2 else None)
        for version in (1, 2):
            if rank == 0:
                weights.update(whole_weights(version))
            assert engine.update().version == version
        version = 3
        if rank == 0:
            weights.update(whole_weights(3))
        error = attempt(engine.update)
        assert isinstance(error, WeightUpdateError), error
        assert not error.committed
        assert error.group_ended
        assert rank == 0 or (engine.version, differing(weights, 2, rank - 1, 2)) == (2, [])
        return engine.version


@pytest.mark.parametrize("after", [0, 2])
def test_a_death_in_a_delta_changes_nothing(
    fresh_pool: RankPool, make_network: MakeNetwork, after: int
) -> None:
    with make_network(2, SLOW) as made:
        where = places(made, (0, 1, 1))
        outcomes = fresh_pool.outcomes(
            be_killed_in_a_delta, 3, where, after, connected=False, deadline_s=120
        )
    assert outcomes[2].exit_code == -signal.SIGKILL
    for outcome in outcomes[:2]:
        assert outcome.error is None, outcome.error
        assert outcome.value == 2
