"""The vote on what a call was: what more than half of the ranks did, and who did something else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TypeVar

Value = TypeVar("Value", bound=Hashable)


def majority(values: Sequence[Value | None]) -> Value | None:
    """What more than half of the values are. A None votes for nothing, but counts as one of all."""
    counts = Counter(value for value in values if value is not None)
    value, times = counts.most_common(1)[0] if counts else (None, 0)
    return value if 2 * times > len(values) else None


def culprits_of(values: Sequence[Value | None]) -> list[int]:
    """The ranks that differ from a strict majority; none where there is no majority."""
    usual = majority(values)
    if usual is None:
        return []
    return [rank for rank, value in enumerate(values) if value not in (None, usual)]
