"""From times to a table: a default stays unless something is faster, twice, and nowhere slower."""

from __future__ import annotations

import numpy
import pytest

from unisono import Communicator
from unisono.bench.control import Control
from unisono.comm.shared_memory.communicator import SharedMemoryCommunicator
from unisono.tune.compare import Comparer, Times, is_faster
from unisono.tune.decide import ABOVE, BELOW, algorithm_steps, find_threshold
from unisono.tune.rank import _Search


def times(**us: float) -> Times:
    """Without noise."""
    return Times({name: numpy.full(8, value) for name, value in us.items()})


def two_ways(below_us: float, above_us: float) -> Times:
    return times(**{BELOW: below_us, ABOVE: above_us})


def test_a_candidate_must_be_clearly_faster_and_nowhere_slower() -> None:
    assert is_faster([0.9, 0.92], [True, True])
    assert not is_faster([0.97, 0.96], [True, True]), "too little"
    assert not is_faster([0.5, 1.1], [True, False]), "slower somewhere"
    assert not is_faster([0.9, 0.9], [False, False]), "no more than noise"
    assert not is_faster([], [])


def test_what_disturbs_a_block_disturbs_all_candidates() -> None:
    noise = numpy.array([1, 1, 9, 1, 5, 1, 1, 30.0])
    noisy = Times({"a": 10 * noise, "b": 9 * noise})
    assert noisy.ratio("b", "a") == pytest.approx(0.9)
    assert noisy.is_clear("b", "a")
    assert not noisy.is_clear("a", "b")


def test_a_threshold_moves_to_where_the_ways_cross() -> None:
    measured = {
        1024: two_ways(1.0, 3.0),
        2048: two_ways(2.0, 3.0),
        4096: two_ways(4.0, 3.0),
        8192: two_ways(8.0, 4.0),
    }
    assert find_threshold(measured, default=16384) == 4096
    assert find_threshold(measured, default=1024) == 4096
    assert find_threshold(measured, default=4096) is None
    assert find_threshold(measured, default=3000) is None, "the same way at every size"
    nearly = {size: two_ways(1.0, 0.98) for size in measured}
    assert find_threshold(nearly, default=16384) is None, "too little to change anything"
    never = {size: two_ways(1.0, 2.0) for size in measured}
    assert find_threshold(never, default=2048) == 16384


def test_steps_from_algorithm_to_algorithm() -> None:
    fastest = {64: "engine", 1024: "ring", 4096: "ring", 9000: "engine", 10_000: "binomial"}
    assert algorithm_steps(fastest) == [
        {"from_bytes": 1024, "algorithm": "ring"},
        {"from_bytes": 9000, "algorithm": "engine"},
        {"from_bytes": 10_000, "algorithm": "binomial"},
    ]
    assert algorithm_steps({64: "engine", 1024: "engine"}) == []


@pytest.mark.ranks(2)
def test_a_bad_default_is_found_and_replaced_on_every_rank_alike(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unisono.tune.rank.COLLECTIVES", ("all_gather",))
    group = comm.split(range(2))
    assert isinstance(group, SharedMemoryCommunicator)
    search = _Search(Comparer(group, Control(comm)), 30.0, lambda text: None)
    search._cell_s = 0.05
    search._defaults["all_gather_turn"] = search._tuned["all_gather_turn"] = 4096
    group.tune(search._defaults)
    nominated = search._find_turns()
    assert nominated.keys() == {"all_gather_turn"}, search._tried
    search._confirm(nominated)
    assert search._tuned == search._defaults | nominated
    found = numpy.zeros(2, numpy.int64)
    comm.all_gather(found, numpy.array([search._tuned["all_gather_turn"]]))
    assert found[0] == found[1] >= 32768
    assert group.tuning == search._defaults, "the group is left as it was"
    group.close()
