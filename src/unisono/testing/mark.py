"""The arguments of `@pytest.mark.ranks`."""

from __future__ import annotations

import unittest
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from _pytest.outcomes import Failed

TIMEOUT_INI = "ranks_timeout_s"

COUNT = "_ranks"
"""The parameter that repeats a test with a list of counts."""

_HOW = "write @pytest.mark.ranks(4), or @pytest.mark.ranks([1, 2, 4]) to repeat the test"


class BadMark(Failed):
    """An invalid mark. Raised in a test's setup, it fails the test with this one sentence."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence, pytrace=False)


@dataclass(frozen=True)
class Plan:
    """How many ranks a test runs on, its time limit, the backend of `process_group`, and whether
    the sanitizer is on."""

    size: int
    backend: str
    timeout_s: float
    sanitize: bool = False


def plan_of(item: pytest.Item) -> Plan | None:
    """The plan of a test; None without a mark. Raises BadMark."""
    mark = item.get_closest_marker("ranks")
    if mark is None:
        return None
    if issubclass(getattr(item, "cls", None) or object, unittest.TestCase):
        raise BadMark(
            "pytest.mark.ranks cannot run the tests of a unittest.TestCase: use a function or a "
            "plain class"
        )
    unknown = sorted(set(mark.kwargs) - {"backend", "timeout_s", "sanitize"})
    if unknown:
        raise BadMark(
            f"pytest.mark.ranks has no argument {', '.join(unknown)}: it takes the number of "
            "ranks, backend=, timeout_s= and sanitize="
        )
    size = counts_of(mark)[0]
    if repeats(mark):
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if COUNT not in parameters:
            raise BadMark(
                "a list of counts works neither in pytest.param nor outside of test functions: "
                "pass one number"
            )
        size = parameters[COUNT]
    backend = mark.kwargs.get("backend", "unisono")
    if not isinstance(backend, str) or not backend:
        raise BadMark(f"backend of pytest.mark.ranks must be a name, not {backend!r}")
    sanitize = mark.kwargs.get("sanitize", False)
    if not isinstance(sanitize, bool):
        raise BadMark(f"sanitize of pytest.mark.ranks must be True or False, not {sanitize!r}")
    return Plan(size, backend, _timeout_s(mark, item.config), sanitize)


def counts_of(mark: pytest.Mark) -> Sequence[int]:
    """The numbers of ranks of the mark: one, or those of a list. Raises BadMark."""
    if len(mark.args) != 1:
        raise BadMark(f"pytest.mark.ranks needs the number of ranks: {_HOW}")
    counts: Sequence[int] = mark.args[0] if repeats(mark) else mark.args
    if not counts:
        raise BadMark(f"pytest.mark.ranks got an empty list: {_HOW}")
    for count in counts:
        if not isinstance(count, int) or isinstance(count, bool):
            raise BadMark(f"pytest.mark.ranks needs a whole number of ranks, not {count!r}: {_HOW}")
        if count < 1:
            raise BadMark(f"pytest.mark.ranks needs at least 1 rank, not {count}")
    return counts


def repeats(mark: pytest.Mark) -> bool:
    """Whether the mark has a list of counts."""
    return isinstance(mark.args[0], (list, tuple))


def _timeout_s(mark: pytest.Mark, config: pytest.Config) -> float:
    where, given = "timeout_s of pytest.mark.ranks", mark.kwargs.get("timeout_s")
    if given is None:
        where, given = f"the ini option {TIMEOUT_INI}", config.getini(TIMEOUT_INI)
    try:
        seconds = float(given)
    except (TypeError, ValueError):
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise BadMark(f"{where} must be a positive number of seconds, not {given!r}")
    return seconds
