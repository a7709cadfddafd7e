from __future__ import annotations

import pytest

from unisono.errors import name_ranks, plural


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], "no rank"),
        ([3], "rank 3"),
        ([1, 0], "ranks 0 and 1"),
        ([0, 1, 3], "ranks 0, 1 and 3"),
        ([1, 2, 3], "ranks 1-3"),
        ([0, 4, 5, 6, 9], "ranks 0, 4-6 and 9"),
        (range(0, 40, 2), "ranks 0, 2, 4, 6, 8, 10 and 14 more"),
    ],
)
def test_ranks_are_named_as_a_sentence_does(ranks: list[int], text: str) -> None:
    assert name_ranks(ranks) == text


@pytest.mark.parametrize(
    ("singular", "several"),
    [("was killed by SIGKILL", "were killed by SIGKILL"), ("raised", "raised")],
)
def test_what_one_rank_did_is_said_of_several(singular: str, several: str) -> None:
    assert plural(singular) == several
