"""Steps found from the calls' own period."""

from __future__ import annotations

import pytest

from unisono.watch.steps import find_steps


@pytest.mark.parametrize(
    ("calls", "steps"),
    [
        ("startup" + "abcc" * 5 + "end", ["abcc"] * 5),
        ("aaaab" * 4, ["aaaab"] * 4),
        ("xyz" + "a" * 4, ["a"] * 4),
        ("ababcdef", []),
        ("", []),
    ],
)
def test_steps_are_found_between_other_calls(calls: str, steps: list[str]) -> None:
    found = find_steps(calls)
    assert [calls[begin : begin + found.step] for begin in found[:-1]] == steps
