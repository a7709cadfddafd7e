"""What `@pytest.mark.ranks` asks for."""

from __future__ import annotations

import unittest
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

DEFAULT_BACKEND = "unisono"
"""What `process_group` is made with where the mark does not say."""

DEFAULT_TIMEOUT_S = 60.0
"""A test's deadline where neither the mark nor the ini file gives one."""

TIMEOUT_INI = "ranks_timeout_s"

COUNT = "_ranks"
"""The parameter by which a test with a list of counts is repeated."""

_HOW = "write @pytest.mark.ranks(4), or @pytest.mark.ranks([1, 2, 4]) to repeat the test"


class BadMark(ValueError):
    """The mark makes no sense; the text says why in one sentence."""


@dataclass(frozen=True)
class Plan:
    """How one test is to run: on `size` ranks, ended after `timeout_s`."""

    size: int
    backend: str
    timeout_s: float


def plan_of(item: pytest.Item) -> Plan | None:
    """The plan of a test; None where it has no mark. Raises BadMark."""
    mark = item.get_closest_marker("ranks")
    if mark is None:
        return None
    if issubclass(getattr(item, "cls", None) or object, unittest.TestCase):
        raise BadMark(
            "pytest.mark.ranks cannot run the tests of a unittest.TestCase: use a function or a "
            "plain class"
        )
    _check_arguments(mark)
    count = mark.args[0]
    if isinstance(count, (list, tuple)):
        _check_counts(count)
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if COUNT not in parameters:
            raise BadMark(
                "a list of ranks repeats a test, which works neither in pytest.param nor outside "
                "of test functions: give one number"
            )
        count = parameters[COUNT]
    _check_count(count)
    backend = mark.kwargs.get("backend", DEFAULT_BACKEND)
    if not isinstance(backend, str) or not backend:
        raise BadMark(f"backend of pytest.mark.ranks must be a name, not {backend!r}")
    return Plan(count, backend, _timeout_s(mark, item.config))


def repetitions(mark: pytest.Mark) -> Sequence[int]:
    """The counts of a mark with a list; empty where there is none, or it makes no sense."""
    if len(mark.args) != 1 or not isinstance(mark.args[0], (list, tuple)):
        return ()
    try:
        _check_counts(mark.args[0])
    except BadMark:
        return ()  # the test itself will say so
    return mark.args[0]


def _check_arguments(mark: pytest.Mark) -> None:
    unknown = sorted(set(mark.kwargs) - {"backend", "timeout_s"})
    if unknown:
        raise BadMark(
            f"pytest.mark.ranks does not know {', '.join(unknown)}: it takes the number of ranks, "
            "backend= and timeout_s="
        )
    if len(mark.args) != 1:
        raise BadMark(f"pytest.mark.ranks needs the number of ranks: {_HOW}")


def _check_counts(counts: Sequence[object]) -> None:
    if not counts:
        raise BadMark(f"pytest.mark.ranks got an empty list: {_HOW}")
    for count in counts:
        _check_count(count)
    if len(set(counts)) != len(counts):
        raise BadMark(f"pytest.mark.ranks({counts!r}) names a number twice")


def _check_count(count: object) -> None:
    if not isinstance(count, int) or isinstance(count, bool):
        raise BadMark(f"pytest.mark.ranks needs a whole number of ranks, not {count!r}: {_HOW}")
    if count < 1:
        raise BadMark(f"pytest.mark.ranks needs at least 1 rank, not {count}")


def _timeout_s(mark: pytest.Mark, config: pytest.Config) -> float:
    where, given = "timeout_s of pytest.mark.ranks", mark.kwargs.get("timeout_s")
    if given is None:
        where, given = f"the ini option {TIMEOUT_INI}", config.getini(TIMEOUT_INI)
    try:
        seconds = float(given)
    except (TypeError, ValueError):
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise BadMark(f"{where} must be a number of seconds above 0, not {given!r}")
    return seconds
