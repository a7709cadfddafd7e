"""The transports of a Communicator, and the backends, that tests run on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
import torch

from ranks import attempt
from unisono.comm.communicator import Communicator

EVERY = [
    *(("native", ranks) for ranks in (1, 2, 3, 4, 8)),
    *(("torch", ranks) for ranks in (1, 2, 3, 4)),
    *(("shared", ranks) for ranks in (2, 3, 4, 8)),
    *(("mixed", ranks) for ranks in (2, 3, 4)),
    ("hosts2x2", 4),
    ("hosts1x3", 4),
    ("hosts5", 6),
]
# Which ranks of the native transport have their tensors in shared memory.
SHARING: dict[str, Callable[[int], bool]] = {
    "shared": lambda rank: True,
    "mixed": lambda rank: rank % 2 == 1,
}
# How the ranks of the transport over hosts are placed: each rank's host, in rank order.
PLACEMENTS = {"hosts2x2": "ABBA", "hosts1x3": "ABBB", "hosts5": "ABCDEB"}
# The transport of a process group of our torch backend.
RESOLVED = [("resolved", 2)]
# The sizes of every run: three is the smallest group in which gloo may add in its own order, eight
# has every power of two below it.
QUICK = {("native", 1), ("native", 2), ("native", 3), ("native", 8), ("torch", 3)}
# For tests whose cases do not depend on the number of ranks.
QUICK_DTYPES = QUICK - {("native", 8)}
# For tests of the engine's own thresholds whose expected results take long to compute.
QUICK_HEAVY = {("native", 1), ("native", 2), ("native", 3), ("native", 4)}


def implementation(name: str, ranks: int, quick: Collection[tuple[str, int]] = QUICK) -> Any:
    """A parameter for the fixture `comm`: this transport with this many ranks."""
    marks = [pytest.mark.ranks(ranks, backend="gloo" if name == "torch" else "unisono")]
    if name in PLACEMENTS:
        marks.append(pytest.mark.hosts)
        marks += [pytest.mark.slow] if ranks > 4 else []
    elif (name, ranks) not in quick:
        marks.append(pytest.mark.slow)
    return pytest.param(name, id=f"{name}-{ranks}", marks=marks)


def ranks_from(least: int) -> list[tuple[str, int]]:
    """The transports with at least `least` ranks."""
    return [(name, ranks) for name, ranks in EVERY if ranks >= least]


OURS = [(name, ranks) for name, ranks in EVERY if name != "torch"]
"""Those whose reductions are ours."""


def on_implementations(
    implementations: list[tuple[str, int]], quick: Collection[tuple[str, int]] = QUICK
) -> pytest.MarkDecorator:
    """Run a test on these transports, not on every one; without `slow`, only on the quick ones."""
    every = [implementation(*chosen, quick) for chosen in implementations]
    return pytest.mark.parametrize("comm", every, indirect=True)


def on_backends(**rank_counts: Sequence[int]) -> pytest.MarkDecorator:
    """Run a test that takes `backend` on these backends, with each of these numbers of ranks."""
    params = [
        pytest.param(name, marks=pytest.mark.ranks(ranks, backend=name), id=f"{name}{ranks}")
        for name, counts in rank_counts.items()
        for ranks in counts
    ]
    return pytest.mark.parametrize("backend", params)


def refused_by(call: Callable[..., Any], *args: Any) -> BaseException:
    error = attempt(call, *args)
    assert isinstance(error, (TypeError, ValueError)), f"{call.__name__}: {error!r}"
    assert len(str(error).splitlines()[0]) > 10
    return error


def assert_usable(comm: Communicator) -> None:
    comm.all_reduce(tensor := torch.ones(2))
    assert tensor.tolist() == [comm.size] * 2
