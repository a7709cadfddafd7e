"""Training whose checkpoint does not depend on the number of ranks, nor on a death."""

from __future__ import annotations

import hashlib
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from made_up_hosts import world
from ranks import RankPool, attempt, raised
from unisono import PeerLost, UnisonoError
from unisono.comm.communicator import Communicator
from unisono.training import GradientSync, ShardedOptimizer

COUNT, STEPS = 16, 6


def make(width: int = 32) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 1))
    return model, torch.optim.AdamW(model.parameters(), 0.01)


def loss_of(model: nn.Module, step: int, number: int) -> torch.Tensor:
    chance = torch.Generator().manual_seed(1000 * step + number)
    x = torch.randn(16, 8, generator=chance) * 10 ** (number % 5 - 2)
    result: torch.Tensor = (model(x) - x.sum(1, keepdim=True)).square().mean()
    return result


def digest(model: nn.Module, losses: list[torch.Tensor]) -> str:
    numbers = torch.cat([*(p.detach().flatten() for p in model.parameters()), *losses])
    return hashlib.sha256(numbers.numpy().tobytes()).hexdigest()


def train(comm: Communicator, dies_at: int = -1) -> str:
    """The digest of the parameters and the losses after all steps."""
    torch.set_num_threads(1)
    model, optimizer = make()
    losses: list[torch.Tensor] = []
    group = comm
    sync = GradientSync(model, group, bucket_bytes=2000, contribution_count=COUNT)
    while len(losses) < STEPS:
        step = len(losses)
        if step == dies_at and comm.rank == 1:
            os.kill(os.getpid(), 9)
        try:
            own = []
            for number in sync.contributions():
                loss = loss_of(model, step, number)
                loss.backward()
                own.append(loss.detach().reshape(1))
            sync.finish()
            group.all_reduce(shown := torch.zeros(1), "avg", contributions=own)
        except PeerLost:
            group = group.shrink()
            sync.close()
            model.zero_grad()
            sync = GradientSync(model, group, bucket_bytes=2000, contribution_count=COUNT)
            continue
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(shown)
    sync.close()
    return digest(model, losses)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_checkpoint_is_that_of_one_rank(pool: RankPool, ranks: int) -> None:
    assert set(pool.run(train, ranks)) == set(pool.run(train, 1))


def make_sharded(group: Communicator) -> tuple[nn.Module, ShardedOptimizer]:
    model, _ = make(300)
    make_inner = torch.optim.AdamW
    return model, ShardedOptimizer(model, make_inner, group, lr=0.01, contribution_count=COUNT)


def save(group: Communicator, place: Path, *what: Any) -> None:
    """A checkpoint: a file for each rank, and one that says that all are there."""
    place.mkdir(exist_ok=True)
    torch.save(what, place / f"{group.rank}.pt")
    group.barrier()
    if group.rank == 0:
        (place / "complete").touch()
    group.barrier()


def load(model: nn.Module, optimizer: ShardedOptimizer, place: Path) -> list[torch.Tensor]:
    """Return the norms so far."""
    count = len(list(place.glob("*.pt")))
    models, states, norms = zip(
        *(torch.load(place / f"{rank}.pt") for rank in range(count)), strict=True
    )
    model.load_state_dict(models[0])
    optimizer.load_state_dict(states)
    return norms[0]


def train_sharded(
    comm: Communicator, folder: Path | None = None, steps: int = STEPS, dies_at: int = -1
) -> str:
    """The same for a ShardedOptimizer, whose shares follow the number of ranks, and its norms.
    With a folder it has checkpoints there, and continues from the last one."""
    torch.set_num_threads(1)
    group, restart = comm, True
    while True:
        if restart:
            (model, optimizer), norms, restart = make_sharded(group), [], False
            if folder is not None and (found := sorted(folder.glob("*/complete"))):
                norms = load(model, optimizer, found[-1].parent)
        step = len(norms)
        if step == steps:
            return digest(model, norms)
        try:
            for number in optimizer.contributions():
                if step == dies_at and comm.rank == 1 and number == COUNT // comm.size + 1:
                    os.kill(os.getpid(), 9)
                loss_of(model, step, number).backward()
            norm = optimizer.step(max_norm=1.0)
            assert norm is not None
            norms.append(norm.reshape(1))
            if folder is not None and len(norms) % 2 == 0:
                place = folder / f"{len(norms)}-{group.size}"
                save(group, place, model.state_dict(), optimizer.state_dict(), norms)
        except PeerLost:
            group, restart = group.shrink(), True


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_sharded_optimizer_has_the_same_bits(pool: RankPool, ranks: int) -> None:
    assert set(pool.run(train_sharded, ranks)) == set(pool.run(train_sharded, 1))


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_its_checkpoint_continues_on_another_number(
    pool: RankPool, tmp_path: Path, ranks: int
) -> None:
    pool.run(train_sharded, 4, tmp_path, 4)
    assert (tmp_path / "4-4" / "3.pt").exists()
    assert set(pool.run(train_sharded, ranks, tmp_path)) == set(pool.run(train_sharded, 1))
    assert not (tmp_path / f"2-{ranks}").exists(), "it has begun from the beginning"


def test_and_after_a_death_that_takes_a_share_with_it(fresh_pool: RankPool, tmp_path: Path) -> None:
    outcomes = fresh_pool.outcomes(train_sharded, 4, tmp_path, STEPS, 3)
    left = [outcome for rank, outcome in enumerate(outcomes) if rank != 1]
    assert all(outcome.error is None for outcome in left), left
    assert {outcome.value for outcome in left} == set(fresh_pool.run(train_sharded, 1))
    assert {path.parent.name for path in tmp_path.glob("*/complete")} == {"2-4", "4-3", "6-3"}


@pytest.mark.ranks(2)
def test_a_state_that_is_not_whole_is_refused(comm: Communicator) -> None:
    model, optimizer = make_sharded(comm)
    for number in optimizer.contributions():
        loss_of(model, 0, number).backward()
    optimizer.step()
    error = raised(ValueError, partial(optimizer.load_state_dict, [optimizer.state_dict()]))
    assert "the ranks' states have 1536 elements, not 3001" in str(error)
    assert "no states" in str(raised(ValueError, partial(optimizer.load_state_dict, [])))


def train_on_hosts(rank: int, size: int, path: str, hosts: str) -> str:
    with world(rank, path, hosts) as comm:
        return train(comm)


def test_it_is_so_over_hosts(pool: RankPool) -> None:
    assert set(pool.run(train_on_hosts, 3, "ABA", connected=False)) == set(pool.run(train, 1))


def test_and_after_a_death(fresh_pool: RankPool) -> None:
    outcomes = fresh_pool.outcomes(train, 4, 3)
    left = [outcome for rank, outcome in enumerate(outcomes) if rank != 1]
    assert all(outcome.error is None for outcome in left), left
    expected = fresh_pool.run(train, 1)
    assert {outcome.value for outcome in left} == set(expected)


@pytest.mark.ranks(2)
def test_a_wrong_use_is_told(comm: Communicator) -> None:
    model, _ = make()
    raised(ValueError, partial(GradientSync, model, contribution_count=1))
    raised(ValueError, partial(GradientSync, model, contribution_count=4, wire="int8"))
    raised(ValueError, partial(GradientSync, model, wire="int4"))
    sync = GradientSync(model, contribution_count=4)
    assert "outside of its contribution" in str(attempt(loss_of(model, 0, 0).backward))
    sync.discard()
    for number in sync.contributions():
        if number:
            loss_of(model, 0, number).backward()
    error = raised(UnisonoError, sync.finish)
    assert "(on 1 of 4 contributions" in str(error)
    sync.close()
    model.zero_grad()
    optimizer = ShardedOptimizer(model, torch.optim.SGD, contribution_count=4)
    for number in optimizer.contributions():
        if number:
            loss_of(model, 0, number).backward()
    assert "(on 1 of 4 contributions" in str(raised(UnisonoError, optimizer.step))
