"""Works on a shared GPU that start in a backward pass: when, and in what order, they run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from unisono.comm.cuda.backward import WorksOfBackward, in_backward
from unisono.comm.work import FinishedWork, Work


def backward_with(*hooks: Callable[[], object]) -> None:
    """A backward pass that calls these on its way."""
    value = torch.ones(2, requires_grad=True)
    result = value
    for hook in hooks:
        result = result * 2
        result.register_hook(lambda gradient, hook=hook: hook() and None)
    result.sum().backward()


class Calls:
    """Works that record when they begin."""

    def __init__(self) -> None:
        self.works = WorksOfBackward()
        self.log: list[str] = []

    def add(self, name: str) -> Work:
        return self.works.add(lambda: self.begin(name))

    def begin(self, name: str) -> Work:
        if name == "bad":
            raise RuntimeError("no memory")
        self.log.append(name)
        return FinishedWork()


def test_they_begin_at_the_end_of_the_pass_in_their_order() -> None:
    calls = Calls()
    seen: list[list[str]] = []
    backward_with(
        lambda: seen.append(list(calls.log)),
        lambda: calls.add("second"),
        lambda: calls.add("first"),
    )
    assert seen == [[]]
    assert calls.log == ["first", "second"]
    assert not calls.works


@pytest.mark.parametrize("ask", [lambda work: work.wait(), lambda work: work.is_completed()])
def test_whoever_asks_after_one_begins_those_before_it_too(ask: Callable[[Work], object]) -> None:
    calls = Calls()

    def begin_three() -> None:
        first, second = calls.add("first"), calls.add("second")
        assert calls.works
        ask(second)
        assert calls.log == ["first", "second"]
        first.wait()
        calls.add("third")
        calls.works.begin_all()  # like any other call
        assert calls.log == ["first", "second", "third"]

    backward_with(begin_three)
    assert calls.log == ["first", "second", "third"]


def test_the_pass_raises_what_could_not_begin() -> None:
    calls = Calls()
    works: list[Work] = []
    hooks = [lambda name=name: works.append(calls.add(name)) for name in ("behind", "bad", "first")]
    with pytest.raises(RuntimeError, match="no memory"):
        backward_with(*hooks)
    first, bad, behind = works
    first.wait()
    for work in (bad, behind):
        assert work.is_completed()
        with pytest.raises(RuntimeError, match="no memory"):
            work.wait()
        assert "no memory" in str(work.exception())
    backward_with(lambda: calls.add("next"))
    assert calls.log == ["first", "next"]


def test_a_pass_is_known_from_what_is_around_it() -> None:
    assert not in_backward()
    seen = []
    backward_with(lambda: seen.append(in_backward()))
    assert seen == [True]
    assert not in_backward()
