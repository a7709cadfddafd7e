"""Ranks whose calls are shifted, found from the lines of their calls."""

from __future__ import annotations

from dataclasses import replace

from made_up_records import group, record

from unisono.comm.shared_memory.records import Record
from unisono.watch.alignment import LineShift, expected_call, find_shift, unexpected_calls
from unisono.watch.differences import shifted_by_lines


def calls(*lines: int, step: int = 0) -> list[Record]:
    return [record(at, site=f"t.py:{line}", step=step) for at, line in enumerate(lines, 1)]


def look(*ranks: list[int]) -> tuple[int, bool, list[str | None]] | None:
    """Which rank is shifted, whether it skipped a call, and the lines of its calls."""
    found = find_shift(group(*(calls(*lines) for lines in ranks)))
    return found and (found.rank, found.is_left_out, [call.site for call in found.calls])


def test_a_call_left_out_where_the_next_iteration_begins_on_the_same_line() -> None:
    usual = [27, 27, 36] * 4
    assert look(usual, [27, 27, 36, 27, 36, 27, 27, 36, 27], usual) == (1, True, ["t.py:27"])


def test_a_call_too_many() -> None:
    usual = [1, 2, 3] * 4
    assert look(usual, usual, [1, 2, 3, 1, 9, 2, 3, 1, 2]) == (2, False, ["t.py:9"])


def test_several_calls_in_a_row() -> None:
    usual = [1, 2, 3, 4, 5] * 3
    assert look(usual, [1, 2, 3, 4, 5, 1, 4, 5, 1, 2, 3], usual) == (1, True, ["t.py:2", "t.py:3"])


def test_what_will_follow_is_known_from_what_has_followed() -> None:
    """All wait: no rank has got past the call that differs."""
    assert look([7, 8, 9, 7, 8], [7, 8, 9, 7, 9], [7, 8, 9, 7, 8]) == (1, True, ["t.py:8"])
    assert look([7, 8, 9, 7, 8], [7, 8, 9, 7, 5], [7, 8, 9, 7, 8]) is None


def test_of_two_ranks_the_one_that_breaks_the_pattern() -> None:
    assert look([7, 8, 9, 7, 8, 9, 7], [7, 8, 9, 7, 9, 7, 8]) == (1, True, ["t.py:8"])


def test_of_two_lines_in_turn_the_rank_that_is_ahead_at_the_end_left_one_out() -> None:
    usual = [1, 2] * 40
    assert look([*usual, 9], [1, 2, 1, *usual[4:], 9], [*usual, 9]) == (1, True, ["t.py:2"])
    assert look([*usual, 9], [1, 2, 2, *usual[2:], 9], [*usual, 9]) == (1, False, ["t.py:2"])
    shifted = [calls(*usual, 9), calls(1, 2, 1, *usual[4:], 9), calls(*usual, 9)]
    shift = find_shift(group(*shifted))
    assert shift is not None
    assert shift.number == 4  # not where the records end
    assert look(usual, [1, 2, 1, *usual[4:]], usual) is None  # who knows?


def test_a_rank_that_only_repeats_its_loop_may_have_made_more_calls() -> None:
    """Whether it left out line 9, or its loop is longer, shows when it comes to line 9."""
    epoch = [1, 2, 1, 2, 1, 2, 9]
    usual = [*epoch, *epoch]
    assert look(usual, [*epoch, *epoch[:-1], 1], usual) is None
    assert look(usual, [*epoch, *epoch[:-1], 1, 2, 1, 2], usual) is None
    left_out = [*epoch, *epoch[:-1], *epoch, *epoch]
    assert look([*usual, *epoch, *epoch], left_out, [*usual, *epoch]) == (1, True, ["t.py:9"])


def test_what_is_no_shift() -> None:
    usual = [1, 2, 3] * 5
    assert look(usual, [1, 7, 3] * 5, usual) is None  # its own branch
    assert look(usual, [1, 3, 2, *usual[3:]], usual) is None  # the other order
    assert look(usual, usual[:4], usual) is None  # it is behind
    before = [1, 2, 1, 2]
    turns = [[*before, *([4] * rank + [3] + [4] * (2 - rank)) * 6] for rank in range(3)]
    assert look(*turns) is None  # one rank after the other takes the branch


def test_the_steps_tell_a_skipped_rest_from_a_call_too_many() -> None:
    def iterations(*parts: list[int]) -> list[Record]:
        made = [(line, step) for step, part in enumerate(parts) for line in part]
        return [
            record(at, site=f"t.py:{line}", step=step) for at, (line, step) in enumerate(made, 1)
        ]

    usual = iterations(*[[1, 2, 3]] * 5)
    early = iterations([1, 2, 3], [1], [1, 2, 3], [1, 2, 3], [1, 2, 3])
    found = find_shift(group(usual, early, usual))
    assert found is not None
    assert (found.is_left_out, [call.site for call in found.calls]) == (True, ["t.py:2", "t.py:3"])
    once_more = find_shift(group(usual, [replace(call, step=0) for call in early], usual))
    assert isinstance(once_more, LineShift)
    assert not once_more.is_left_out


def test_a_shift_is_told_unasked_only_beyond_doubt() -> None:
    usual = calls(*[27, 27, 36] * 8)
    early = group(usual, calls(27, 27, 36, 27, 36, 27), usual)
    assert shifted_by_lines(early) is None
    late = group(usual, calls(*[27, 27, 36], *[27, 36], *[27, 27, 36] * 5), usual)
    report = shifted_by_lines(late)
    assert report is not None
    assert (report.kind, report.culprits, report.site) == ("apart", (1,), "t.py:27")
    assert report.verdict == "rank 1 left out all_reduce #5 of group dp (t.py:27)"
    assert "  #5     t.py:27  -" in report.details


# -- calls that repeat ---------------------------------------------------------------------------


def test_where_a_repetition_breaks() -> None:
    assert unexpected_calls(list("abababcab")) == [(6, 4)]
    assert unexpected_calls(list("abcabcabc")) == []
    assert unexpected_calls(list("ababaab")) == [(5, 3)]
    assert unexpected_calls(list("abac")) == []  # seen only once before


def test_what_is_due_after_a_repetition() -> None:
    assert expected_call(list("xababa")) == 4
    assert expected_call(list("xab")) is None
    assert expected_call([]) is None
