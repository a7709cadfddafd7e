"""A trainer or an engine is killed in each phase of a weight update: all survivors serve one
version, the old one or the new one, and say which."""

from __future__ import annotations

import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator

import pytest

from ranks import RankPool
from weight_kills import PHASES, Kill, be_killed_or_survive, run_kills, table


def test_one_kill_in_each_phase(fresh_pool: RankPool) -> None:
    chance = random.Random(time.time_ns())
    kills = [Kill.random(number, chance) for number in range(len(PHASES))]
    took = run_kills(fresh_pool, kills, be_killed_or_survive)
    assert took.keys() >= set(PHASES) - {"any moment"}


@pytest.fixture(scope="module")
def all_took() -> Iterator[dict[str, list[float]]]:
    """Shows the times of all kills at the end."""
    took: dict[str, list[float]] = defaultdict(list)
    yield took
    sys.stderr.write("\n".join(["", *table(took), ""]))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_hundred_kills(fresh_pool: RankPool, all_took: dict[str, list[float]], seed: int) -> None:
    chance = random.Random(seed)
    kills = [Kill.random(number, chance) for number in range(100)]
    for phase, times in run_kills(fresh_pool, kills, be_killed_or_survive).items():
        all_took[phase] += times
