"""What each rank has after a collective, compared with results written out here."""

from __future__ import annotations

import numpy
import pytest

from unisono.plan.expectations import CUT_INPUTS, compute, origins

WHOLE = {0: [1, 2, 3], 1: [10, 20, 30], 2: [100, 200, 300]}
"""The inputs of ranks 0, 1 and 2: a part of one number for each rank, or all three as one part."""

RESULTS: dict[str, list[list[int] | None]] = {
    "all_reduce": [[111, 222, 333]] * 3,
    "reduce": [None, [111, 222, 333], None],
    "reduce_scatter": [[111], [222], [333]],
    "broadcast": [[10, 20, 30]] * 3,
    "scatter": [[10], [20], [30]],
    "all_gather": [[1, 2, 3, 10, 20, 30, 100, 200, 300]] * 3,
    "gather": [None, [1, 2, 3, 10, 20, 30, 100, 200, 300], None],
    "all_to_all": [[1, 10, 100], [2, 20, 200], [3, 30, 300]],
    "ring": [[100, 200, 300], [1, 2, 3], [10, 20, 30]],
}


@pytest.mark.parametrize("collective", RESULTS)
def test_the_results_of_three_ranks(collective: str) -> None:
    def brought(rank: int, part: int) -> numpy.ndarray:
        return numpy.array(
            WHOLE[rank][part : part + 1] if collective in CUT_INPUTS else WHOLE[rank]
        )

    for rank, result in enumerate(RESULTS[collective]):
        parts = origins(collective, rank, 3, root=1)
        values = None if parts is None else [compute(part, brought) for part in parts]
        assert (None if values is None else numpy.concatenate(values).tolist()) == result


@pytest.mark.parametrize(
    ("op", "result"), [("avg", 4.0), ("product", 48), ("min", 2), ("max", 6), ("bxor", 0)]
)
def test_reductions(op: str, result: float) -> None:
    (part,) = origins("all_reduce", 0, 3) or ()
    assert compute(part, lambda rank, _: numpy.array([2 + 2 * rank]), op).tolist() == [result]


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="'all_swap'"):
        origins("all_swap", 0, 2)
