"""The period of a program's calls: a training step makes the calls of the step before."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from itertools import groupby

_LONGEST = 500
_NEWEST = 4000
_TIMES = 3
"""A step is one that came so often in a row."""
_NEARLY = 0.9
"""A shorter period counts if it covers nearly as much: every multiple of a period is one."""


def find_steps(calls: Sequence[Hashable]) -> range:
    """Where each step begins: the indices of its first calls, and last the index after the last
    whole step. Empty if the calls do not repeat. A call is whatever is equal if it is the same
    call, such as its line, operation and bytes."""
    base = max(0, len(calls) - _NEWEST)
    calls = calls[base:]
    runs = {}
    for period in range(1, min(_LONGEST, len(calls) // _TIMES) + 1):
        stop, length = _longest_run(calls, period)
        if length >= _TIMES * period:
            runs[period] = stop, length
    most = max((length for _, length in runs.values()), default=0)
    for period, (stop, length) in runs.items():
        if length >= _NEARLY * most:
            first = base + stop - length
            return range(first, first + length // period * period + 1, period)
    return range(0)


def _longest_run(calls: Sequence[Hashable], period: int) -> tuple[int, int]:
    """The longest stretch in which each call is the one `period` before: its end and length."""
    best, at = (0, 0), period
    for repeats, run in groupby(map(operator.eq, calls, calls[period:])):
        length = sum(1 for _ in run)
        at += length
        if repeats and length + period > best[1]:
            best = at, length + period
    return best
