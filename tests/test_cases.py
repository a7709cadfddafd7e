"""What each rank has after a collective, compared with results written out here."""

from __future__ import annotations

import re
from pathlib import Path

import numpy
import pytest

from unisono.cases.primitives import PRIMITIVES
from unisono.cases.results import Example

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
}


@pytest.mark.parametrize("collective", RESULTS)
def test_the_results_of_three_ranks(collective: str) -> None:
    primitive = PRIMITIVES[collective]
    count = 3 if not primitive.wide or primitive.wide == ("output",) else 1
    whole = numpy.array([*WHOLE.values()])
    example = Example(primitive, 3, count, lambda rank, index: whole[rank][index], root=1)
    for rank, result in enumerate(RESULTS[collective]):
        found, given, room = example.result(rank), example.input(rank), example.output(rank)
        if result is None:  # it keeps what it has
            result = WHOLE[rank] if collective == "reduce" else None
        assert (None if found is None else found.tolist()) == result
        gives = collective != "scatter" or rank == 1
        assert (None if given is None else given.tolist()) == (WHOLE[rank] if gives else None)
        assert (room is None) == (found is None)


def test_a_barrier_has_no_tensors() -> None:
    example = Example(PRIMITIVES["barrier"], 3, 4, lambda rank, index: index)
    assert (example.input(0), example.output(0), example.result(0)) == (None, None, None)


@pytest.mark.parametrize(
    ("op", "result"), [("avg", 4.0), ("product", 48), ("min", 2), ("max", 6), ("bxor", 0)]
)
def test_reductions(op: str, result: float) -> None:
    example = Example(PRIMITIVES["all_reduce"], 3, 1, lambda r, index: index + 2 + 2 * r, op=op)
    assert example.result(0).tolist() == [result]


def test_the_engine_has_the_same_table() -> None:
    """The functions of csrc/unisono.h that say what holds of an operation."""
    header = (Path(__file__).parents[1] / "csrc/unisono.h").read_text()
    for function, holds in {
        "un_reduces": lambda primitive: primitive.reduces,
        "un_is_rooted": lambda primitive: primitive.is_rooted,
        "un_is_wide_input": lambda primitive: "input" in primitive.wide,
        "un_is_wide_output": lambda primitive: "output" in primitive.wide,
    }.items():
        (body,) = re.findall(rf"bool {function}\([^)]*\) {{(.*?)}}", header, re.DOTALL)
        named = {name.lower() for name in re.findall(r"== UN_(\w+)", body)} - {"allocate"}
        assert named == {name for name, primitive in PRIMITIVES.items() if holds(primitive)}
