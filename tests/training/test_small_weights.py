"""Small weights, which travel packed in one row: what changes between updates, and what fails."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_weight_faults import FIRST, SENDER, FlipsABit, Story, die, outcomes_of
from test_weights import endpoint

from ranks import RankPool
from unisono import Communicator, WeightMismatch, WeightUpdateError
from unisono.comm.engine import native
from unisono.training import WeightReceiver, WeightSender, WeightShard

Weights = dict[str, torch.Tensor]
BASE = torch.arange(24, dtype=torch.float32)


def small_weights(version: int) -> Weights:
    """30 small tensors, and two that are too large to be packed."""
    made = {f"norm {i}": torch.full((3, i + 1), float(version + i)) for i in range(30)}
    return made | {f"layer {i}": torch.full((100, 100), float(version)) for i in range(2)}


def reshape(weights: Weights) -> None:
    weights["norm 3"] = weights["norm 3"].reshape(4, 3)


def grow(weights: Weights) -> None:
    weights["norm 3"] = weights["norm 3"].repeat(1, 7)


def grow_out_of_the_row(weights: Weights) -> None:
    weights["norm 3"] = weights["norm 3"].repeat(100, 100)


def add(weights: Weights) -> None:
    weights["new"] = torch.full((5,), 1.0)


def remove(weights: Weights) -> None:
    del weights["norm 7"]


def change_the_dtype(weights: Weights) -> None:
    weights["norm 3"] = weights["norm 3"].to(torch.bfloat16)
    weights["norm 4"] = weights["norm 4"].to(torch.int64)


def transpose(weights: Weights) -> None:
    weights["norm 3"] = weights["norm 3"].t().contiguous().t()


def empty(weights: Weights) -> None:
    weights["norm 3"] = torch.empty(0, 3)
    weights["norm 4"] = torch.empty(3, 0)


def tie(weights: Weights) -> None:
    weights["norm 3 again"] = weights["norm 3"]
    weights["norm 3 flat"] = weights["norm 3"].view(3, 4)


def look_at_parts(weights: Weights) -> None:
    weights["norm 3"] = torch.zeros(3, 40)[:, :4]


def drop_all_small_ones(weights: Weights) -> None:
    for name in [name for name in weights if name.startswith("norm")]:
        del weights[name]


CHANGES = [
    *(reshape, grow, grow_out_of_the_row, add, remove, change_the_dtype),
    *(transpose, empty, tie, look_at_parts, drop_all_small_ones),
]


def fill(weights: Weights, version: int) -> None:
    """Values that differ from weight to weight and from version to version."""
    for i, tensor in enumerate(weights.values()):
        numbers = torch.arange(tensor.numel()) * 3 + 7 * i + version
        tensor.copy_(numbers.remainder(251).view(tensor.shape))  # exact in bfloat16


@pytest.mark.ranks(3)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_weights_that_change_between_updates(
    comm: Communicator, change: Callable[[Weights], None]
) -> None:
    weights = small_weights(comm.rank)
    with endpoint(comm, weights) as party:
        for version in range(1, 6):
            if version == 3:
                change(weights)
            if comm.rank == SENDER:
                fill(weights, version)
            party.update()
            fresh = small_weights(0)
            if version >= 3:
                change(fresh)
            fill(fresh, version)
            for name, tensor in fresh.items():
                assert torch.equal(weights[name], tensor), (version, name)
                assert weights[name].dtype == tensor.dtype
            assert party.version == version


@pytest.mark.ranks(3)
@pytest.mark.parametrize("change", [reshape, remove, change_the_dtype])
def test_one_engine_alone_has_changed(
    comm: Communicator, change: Callable[[Weights], None]
) -> None:
    weights = small_weights(0)
    with endpoint(comm, weights) as party:
        party.update()
        kept = dict(weights)
        if comm.rank == FIRST:
            change(weights)
        if comm.rank == SENDER:
            fill(weights, 2)
        before = {name: tensor.clone() for name, tensor in weights.items()}
        with pytest.raises(WeightMismatch):
            party.update()
        for name, tensor in before.items():
            assert torch.equal(weights[name], tensor), "nothing has moved"
        weights.update(kept)
        party.update()
        expected = small_weights(0)
        fill(expected, 2)
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("transactional", [True, False])
def test_parameters_views_and_versions(comm: Communicator, transactional: bool) -> None:
    """An engine's parameters stay the same objects, and its views see the new values."""
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(5)])
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 1 - comm.rank)
    parameters, view = list(model.parameters()), model[2].weight.detach()[1:3]
    with endpoint(comm, model, {"transactional": transactional}) as party:
        for version in (1, 2, 3):
            if comm.rank == 0:
                for parameter in parameters:
                    torch.nn.init.constant_(parameter, version)
            party.update()
            assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
            assert all(p.requires_grad and bool(p.eq(version).all()) for p in parameters)
            assert view.unique().tolist() == [version]
    model(torch.ones(4)).sum().backward()


@pytest.mark.ranks(4)
def test_two_senders_of_shards_and_engines_of_columns(comm: Communicator) -> None:
    whole = {f"norm {i}": torch.full((4, 6), float(i)) + BASE.view(4, 6) for i in range(20)}
    if comm.rank < 2:  # rows
        held: Any = {
            name: WeightShard(tensor[2 * comm.rank : 2 * comm.rank + 2], (4, 6), (2 * comm.rank, 0))
            for name, tensor in whole.items()
        }
        party: Any = WeightSender(comm, held)
    else:
        begin = 3 * (comm.rank - 2)
        held = {name: WeightShard(torch.zeros(4, 3), (4, 6), (0, begin)) for name in whole}
        party = WeightReceiver(comm, held)
    for _ in range(3):
        party.update()
        for tensor in whole.values() if comm.rank < 2 else ():
            tensor += 1
    for name, tensor in whole.items() if comm.rank >= 2 else ():
        assert torch.equal(held[name].tensor, tensor[:, begin : begin + 3] + 2)
    party.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", ["convert", "prepare", "take all", "partial", "another sender"])
def test_other_ways_to_send_and_to_receive(comm: Communicator, how: str) -> None:
    weights, served = small_weights(0), {}
    sender: dict[str, Any] = {}
    receiver: dict[str, Any] = {}
    if how == "convert":
        sender = {"convert": True}
        weights = {
            name: tensor.to(torch.float16 if comm.rank else torch.bfloat16)
            for name, tensor in weights.items()
        }
    elif how == "prepare":
        receiver = {"prepare": served.update}
    elif how == "partial":
        receiver = {"partial": True}
        for name in ("norm 1", "norm 2", "layer 0") if comm.rank else ():
            del weights[name]
    party = endpoint(comm, weights, sender, receiver)
    if how == "take all" and comm.rank:
        party = WeightReceiver(comm, commit=served.update)
    for version in (1, 2, 3):
        if how == "another sender" and version == 2 and comm.rank == 0:
            party = endpoint(comm, weights)
        if comm.rank == 0:
            fill(weights, version)
        party.update()
    expected = small_weights(0)
    fill(expected, 3)
    found = served if how == "take all" and comm.rank else weights
    for name, tensor in found.items():
        assert torch.equal(tensor.float(), expected[name]), name
    assert len(found) == len(expected) - (3 if how == "partial" and comm.rank else 0)


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["the row arrives", "the vote", "the sender has sent"])
def test_whoever_dies_engines_serve_one_version(fresh_pool: RankPool, where: str) -> None:
    outcomes = outcomes_of(fresh_pool, lose_one, where)
    dead = SENDER if where == "the sender has sent" else FIRST
    assert outcomes[dead] is None
    for rank in (FIRST, 2):
        if rank != dead:
            assert (outcomes[rank]["serves"], outcomes[rank]["version"]) == (1, 1)
            assert list(outcomes[rank]["failed"]) == [dead]


def lose_one(rank: int, _: int, __: str, name: str, where: str) -> Any:
    story = Story(rank, name)
    options: dict[str, Any] = {}
    if rank == (SENDER if where == "the sender has sent" else FIRST):
        options = {"prepare": die} if where == "the vote" else {"progress": die}
    if rank == SENDER:
        story.party = WeightSender(story.comm, story.weights, **options)
    else:
        story.party = WeightReceiver(story.comm, story.weights, version=1, **options)
    ending = story.update()
    story.close()
    return ending


@pytest.mark.ranks(3)
def test_a_damaged_row_is_noticed(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {f"norm {i}": torch.full((8,), float(comm.rank == SENDER)) for i in range(9)}
    sound = Communicator.broadcast
    damages = [True]

    def damaging(self: Any, tensors: Any, root: int = 0, *, async_op: bool = False) -> Any:
        work = sound(self, tensors, root, async_op=async_op)
        return FlipsABit(work, tensors) if async_op and damages.pop() else work

    with endpoint(comm, weights) as party:
        if comm.rank == FIRST:
            monkeypatch.setattr(Communicator, "broadcast", damaging)
        with pytest.raises(WeightUpdateError) as caught:
            party.update()
        text = r"bucket 0 from rank 0 \(norm 0 to norm 8\) was damaged"
        assert re.search(text, caught.value.failed[FIRST])
        assert all(tensor.unique().tolist() == [comm.rank == SENDER] for tensor in weights.values())
        monkeypatch.undo()
        party.update()
        assert all(tensor.unique().tolist() == [1] for tensor in weights.values())


# -- the engine's copies ---------------------------------------------------------------------------


def test_a_row_holds_tensors_at_multiples_of_16_bytes() -> None:
    tensors = [torch.arange(5, dtype=torch.int8), torch.empty(0), torch.tensor(7.0)]
    row = torch.zeros(32, dtype=torch.uint8)
    native.copy_row(row, tensors, True)
    assert row.tolist() == [0, 1, 2, 3, 4, *[0] * 11, *[0, 0, 0xE0, 0x40], *[0] * 12]
    back = [torch.empty_like(tensor) for tensor in tensors]
    native.copy_row(row, back, False)
    assert all(torch.equal(a, b) for a, b in zip(tensors, back, strict=True))


@pytest.mark.parametrize(
    "wrong",
    [
        [torch.ones(4), torch.ones(2, 2).t()],
        [torch.ones(4), torch.ones(1).expand(4)],
        [torch.ones(4)],
        [torch.ones(4), torch.ones(5)],
        [torch.ones(4), torch.ones(4, device="meta")],
        [torch.ones(4), torch.ones(4, dtype=torch.complex64).conj().imag],
        [torch.ones(4), "text"],
    ],
)
@pytest.mark.parametrize("packs", [True, False])
def test_what_does_not_fit_a_row_changes_nothing(wrong: list[Any], packs: bool) -> None:
    row = torch.full((32,), 9, dtype=torch.uint8)
    with pytest.raises(ValueError, match="not contiguous, or do not fit"):
        native.copy_row(row, wrong, packs)
    assert row.unique().tolist() == [9]
    assert wrong[0].unique().tolist() == [1]


@pytest.mark.ranks(3)
def test_memory_that_an_engine_has_freed(comm: Communicator) -> None:
    """What cannot be unpacked after the vote is found before it."""
    weights = small_weights(comm.rank)
    with endpoint(comm, weights) as party:
        for version in (1, 2):
            if comm.rank == SENDER:
                fill(weights, version)
            elif comm.rank == FIRST:
                weights["norm 3"].untyped_storage().resize_(0)
            party.update()
            fresh = small_weights(0)
            fill(fresh, version)
            assert party.version == version
            assert all(torch.equal(weights[name], tensor) for name, tensor in fresh.items())


@pytest.mark.ranks(2)
def test_backward_knows_that_weights_have_changed(comm: Communicator) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    with endpoint(comm, model) as party:
        loss = model(torch.ones(4, requires_grad=True)).sum()
        party.update()
        if comm.rank != SENDER:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


@pytest.mark.ranks(2)
def test_a_view_of_the_version_before_stays_as_it_was(comm: Communicator) -> None:
    """A thread may take one at any moment, also of memory that the next update would reuse."""
    weights = small_weights(comm.rank)
    with endpoint(comm, weights) as party:
        for version in (1, 2):
            if comm.rank == SENDER:
                fill(weights, version)
            party.update()
        kept = None
        if isinstance(party, WeightReceiver):
            kept = party._staging.tensors["layer 0"].view(-1)
            before = kept.clone()
        if comm.rank == SENDER:
            fill(weights, 3)
        party.update()
        if kept is not None:
            assert torch.equal(kept, before)


class Stubborn(torch.nn.Parameter):
    """A parameter whose memory cannot be exchanged."""

    refuses = True

    def __setattr__(self, name: str, value: object) -> None:
        if name == "data" and self.refuses:
            raise ZeroDivisionError
        super().__setattr__(name, value)


@pytest.mark.ranks(2)
def test_a_swap_that_fails_leaves_small_weights_alone(comm: Communicator) -> None:
    weights: Weights = small_weights(0)
    if comm.rank == SENDER:
        fill(weights, 1)
    else:
        weights["layer 1"] = Stubborn(weights["layer 1"])
    with endpoint(comm, weights) as party:
        with pytest.raises(WeightUpdateError, match="ZeroDivisionError"):
            party.update()
        if comm.rank != SENDER:
            fresh = small_weights(0)
            assert all(torch.equal(weights[name], tensor) for name, tensor in fresh.items())
            Stubborn.refuses = False
        party.update()
        Stubborn.refuses = True
