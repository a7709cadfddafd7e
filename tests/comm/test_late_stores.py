"""Ranks of several hosts shrink while the store answers one of them too late: at each request, and
with the others' hints or without."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from made_up_hosts import world
from ranks import RankPool
from unisono import NoQuorum
from unisono.comm.hosts import going_on
from unisono.comm.meeting.board import Board, StoreGone
from unisono.comm.meeting.outcome import Outcome
from user_programs import eventually

BOUND_S = 25.0
"""Of a shrink: a store's limit, a few turns between stores, and a meeting that fails."""


@contextlib.contextmanager
def lost_answer(at: int, hints: bool) -> Iterator[None]:
    """The store loses the answer to one request of this rank; without `hints` its question whether
    the others have theirs is not answered either."""
    requests, ask = itertools.count(), Board._ask

    def lose(board: Board, request: Callable[[], Any]) -> Any:
        if next(requests) == at:
            raise StoreGone("the answer came too late")
        return ask(board, request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Board, "_ask", lose)
        if not hints:
            patch.setattr(going_on, "_answers_others", lambda *_: False)
        yield


@contextlib.contextmanager
def lost_outcome() -> Iterator[None]:
    """The store loses the answer that tells this rank how the attempt ended, once it has."""

    def lose(outcome: Outcome) -> bool:
        assert eventually(lambda: outcome.settle(None) is not None)
        raise StoreGone("the answer came too late")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Outcome, "wait", lose)
        yield


def await_all(path: str, rank: int, size: int) -> None:
    Path(f"{path}-here-{rank}").touch()
    assert eventually(lambda: all(Path(f"{path}-here-{other}").exists() for other in range(size)))


def shrink_again_and_again(
    rank: int, size: int, path: str, lost: range, hints: bool
) -> list[tuple[int, float]]:
    """After each answer that rank 1 has lost: how many ranks go on, and how long that takes."""
    found = []
    for at in lost:
        with world(rank, f"{path}-{at}", "ABC") as comm:
            comm.barrier()
            await_all(f"{path}-{at}", rank, size)  # one may have left the barrier before the others
            begin_s = time.monotonic()
            try:
                with lost_answer(at, hints) if rank == 1 else contextlib.nullcontext():
                    left = comm.shrink(timeout_s=120)
            except NoQuorum:
                found.append((0, time.monotonic() - begin_s))
                continue
            took_s = time.monotonic() - begin_s
            x = torch.ones(1000)
            left.all_reduce(x)
            assert x.eq(left.size).all()
            left.barrier()
            left.close()
            found.append((left.size, took_s))
    return found


@pytest.mark.parametrize("hints", [True, False])
@pytest.mark.parametrize(
    "lost", [range(3), *(pytest.param(range(n, n + 6), marks=pytest.mark.slow) for n in (3, 9, 15))]
)
def test_no_rank_waits_for_one_at_another_store(
    fresh_pool: RankPool, lost: range, hints: bool
) -> None:
    outcomes = fresh_pool.run(
        shrink_again_and_again, 3, lost, hints, connected=False, deadline_s=200
    )
    for rounds in zip(*outcomes, strict=True):
        sizes = [left for left, _ in rounds]
        assert max(took_s for _, took_s in rounds) < BOUND_S, outcomes
        assert sizes in ([3, 3, 3], [2, 0, 2]), outcomes


def shrink_without_the_outcome(rank: int, size: int, path: str) -> int:
    with world(rank, path, "ABC") as comm:
        comm.barrier()
        await_all(path, rank, size)
        with lost_outcome() if rank == 1 else contextlib.nullcontext():
            left = comm.shrink(timeout_s=120)
        x = torch.ones(1000)
        left.all_reduce(x)
        left.barrier()
        left.close()
        return int(x[0])


def test_no_rank_leaves_a_group_that_is_made(fresh_pool: RankPool) -> None:
    assert fresh_pool.run(shrink_without_the_outcome, 3, connected=False) == [3, 3, 3]
