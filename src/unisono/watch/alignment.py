"""Where the calls of one rank diverge from the others', found by aligning their source lines.

A rank that leaves out a call, or makes one more, is shifted from there on: its n-th call is the
others' n+1-th. So, starting with the first call whose lines differ, both sequences of lines are
aligned as by Needleman and Wunsch (1970), with free ends; the alignment starts with a gap if a rank
is shifted. If the records end too soon, the others' lines are extrapolated from their repetition so
far.

Ranks that wait for each other are another case: being in the cycle is no evidence, since a healthy
rank waits in it, too. So the calls of all ranks are compared, in all groups. Without a difference
between them no rank is named.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from unisono.comm.on_rows.mismatches import find_majority, find_minority
from unisono.comm.shared_memory.records import GroupRecords, Process, Record
from unisono.errors import name_number
from unisono.watch.calls import Wait, by_number, call_name, calls_of, line_of, waits

_AHEAD = 32
"""How many calls after the first difference are aligned."""
_EXPECTED = 8
"""How many calls are extrapolated where the records end."""
_CONTEXT = 16
_SHOWN_BEFORE, _SHOWN_AFTER = 2, 3
_SAME_STEP = 0.5
_CONFIRMED = 2
"""So many calls in a row must have been the expected ones before another one counts."""
LONGEST_PATTERN = 64
"""In how many calls a repetition is looked for."""
_CERTAIN = 8.0
"""How much better the lines must fit with the gap to be a verdict if no call failed."""


@dataclass(frozen=True)
class LineShift:
    """`rank` made calls that the others did not, or left some out: `calls`, the first of which
    would be number `number`. `window` shows both sides, call by call; `is_certain`: long sequences
    fit with the gap and not without it."""

    rank: int
    number: int
    is_left_out: bool
    calls: tuple[Record, ...]
    window: tuple[str, ...]
    is_certain: bool

    def sentence(self, group: str) -> str:
        """The verdict."""
        first = self.calls[0]
        what = call_name(first)
        if len(self.calls) > 1:
            what = f"{name_number(len(self.calls), 'call')}, the first of which is {what}"
        at = f" of group {group} ({line_of(first.site)})"
        if self.is_left_out:
            return f"rank {self.rank} left out {what}{at}"
        if len(self.calls) > 1:
            return f"rank {self.rank} made {what}{at}: the others did not make them"
        return f"rank {self.rank} made a call that the others did not: {what}{at}"


def find_shift(group: GroupRecords) -> LineShift | None:
    """The first place where one rank is shifted. Only a shift counts: two branches of a program may
    make the same call on different lines."""
    table = by_number(group)
    first = next(iter(table), 0)
    branches: set[tuple[str | None, str | None]] = set()
    usual_before: list[str] = []
    for number, records in table.items():
        lines = {rank: record.site for rank, record in records.items() if record.site}
        usual = find_majority(list(lines.values()))
        if usual is None and lines:
            expected = _next_of(usual_before)
            usual = expected if expected in lines.values() else None
        odd = [rank for rank, line in lines.items() if line != usual]
        if usual is not None and len(odd) == 1 and (usual, lines[odd[0]]) not in branches:
            found = _align(group, number, odd[0], usual, usual_before)
            if found is not None:
                return found if number > first or number == 1 else None
            branches.add((usual, lines[odd[0]]))
        usual_before.append(usual or "")
    return None


def _align(
    group: GroupRecords, number: int, rank: int, usual: str, before: Sequence[str]
) -> LineShift | None:
    """The shift of `rank` from call `number` on, if there is one."""
    sequences = {
        member.rank: {record.call: record for record in member.records if record.call is not None}
        for member in group.ranks
    }
    others = [calls for peer, calls in sequences.items() if peer != rank]
    regular = [calls for calls in others if number in calls and calls[number].site == usual]
    all_theirs, all_own = (_from(own, number) for own in (max(regular, key=len), sequences[rank]))
    theirs, own = all_theirs[:_AHEAD], all_own[:_AHEAD]
    branches = {usual, own[0].site}
    for at in max(regular, key=len):
        if branches <= {calls[at].site for calls in others if at in calls}:
            return None  # others, too, make one call on these two lines
    their_base, own_base = (_step_before(calls, number) for calls in (regular[0], sequences[rank]))
    left = [(record.site or "", record.step - their_base) for record in theirs]
    history = [*before, *(line for line, _ in left)]
    for _ in range(_EXPECTED if len(theirs) < _AHEAD else 0):
        expected = _next_of(history)
        if expected is None:
            break
        history.append(expected)
        left.append((expected, -1))
    right = [(record.site or "", record.step - own_base) for record in own]
    scores = _scores(left, right)
    without, more, other = scores[1][0] - 1, scores[0][1] - 1, scores[1][1] - 1
    lead = without - more
    if not lead:  # two lines in turn: a rank that is ahead at the end has left one out
        behind, ahead = (
            sum(one.site != other.site for one, other in zip(*both, strict=False))
            for both in ((all_theirs, all_own[1:]), (all_theirs[1:], all_own))
        )
        lead = behind - ahead
    if max(without, more) <= other or not lead:
        return None
    is_left_out = lead > 0
    if is_left_out and _goes_on(before, [record.site or "" for record in all_own]):
        return None
    gap = _gap(left, right, scores, is_left_out)
    calls = (theirs if is_left_out else own)[:gap]
    window = _window(theirs, own, sequences[rank], number, gap, is_left_out)
    straight = sum(1 if pair[0][0] == pair[1][0] else -1 for pair in zip(left, right, strict=False))
    is_certain = abs(without - more) >= 2 and max(without, more) - straight >= _CERTAIN
    return LineShift(rank, number, is_left_out, tuple(calls), window, is_certain)


def _goes_on(before: Sequence[str], own: Sequence[str]) -> bool:
    """Whether the lines of a rank only repeat those before, as if its loop were longer: nothing
    tells whether it left out what the others did next, or made more calls."""
    lines, periods = [*before, *own], range(1, len(before) // 2 + 1)
    starts = ((len(before) - period, period) for period in periods)
    return any(lines[at:] == lines[at - period : -period] for at, period in starts)


def _from(calls: dict[int, Record], number: int) -> list[Record]:
    """The calls from a number on, without a gap between their numbers."""
    found: list[Record] = []
    while number in calls:
        found.append(calls[number])
        number += 1
    return found


def _step_before(calls: dict[int, Record], number: int) -> int:
    return calls[number - 1].step if number - 1 in calls else 0


def _scores(left: Sequence[tuple[str, int]], right: Sequence[tuple[str, int]]) -> list[list[float]]:
    """How well the rest of both sequences fits, from any pair of positions: 1 for two equal lines,
    more if they are in the same step, -1 for different lines and for a call without a partner.
    Calls after the other's end cost nothing."""
    scores = [[0.0] * (len(right) + 1) for _ in range(len(left) + 1)]
    for i in range(len(left) - 1, -1, -1):
        line, step = left[i]
        for j in range(len(right) - 1, -1, -1):
            own_line, own_step = right[j]
            fits = -1.0 if line != own_line else 1.0 + _SAME_STEP * (step == own_step)
            scores[i][j] = max(
                fits + scores[i + 1][j + 1], scores[i + 1][j] - 1, scores[i][j + 1] - 1
            )
    return scores


def _gap(
    left: Sequence[tuple[str, int]],
    right: Sequence[tuple[str, int]],
    scores: list[list[float]],
    is_left_out: bool,
) -> int:
    """How many calls at the start of the best alignment have no partner."""
    length = 1
    while True:
        i, j = (length, 0) if is_left_out else (0, length)
        if i == len(left) or j == len(right) or left[i][0] == right[j][0]:
            return length
        if scores[i][j] != (scores[i + 1][j] if is_left_out else scores[i][j + 1]) - 1:
            return length
        length += 1


def _window(
    theirs: Sequence[Record],
    own: Sequence[Record],
    own_calls: dict[int, Record],
    number: int,
    gap: int,
    is_left_out: bool,
) -> tuple[str, ...]:
    """The calls around the gap: the others' next to those of the rank."""
    rows = [
        (line_of(own_calls[before].site), line_of(own_calls[before].site), before)
        for before in range(number - _SHOWN_BEFORE, number)
        if before in own_calls
    ]
    longer, shorter = (theirs, own) if is_left_out else (own, theirs)
    for place, record in enumerate(longer[: gap + _SHOWN_AFTER]):
        partner = place - gap
        beside = line_of(shorter[partner].site) if 0 <= partner < len(shorter) else "-"
        pair = (line_of(record.site), beside)
        rows.append((*(pair if is_left_out else pair[::-1]), number + place))
    width = max(len(row[0]) for row in rows)
    shown = [f"  #{at:<5} {theirs_at:<{width}}  {own_at}" for theirs_at, own_at, at in rows]
    return ("the others' calls and its own, side by side:", *shown)


def _next_of(lines: Sequence[str]) -> str | None:
    """What followed the last time these lines ended as they do now, with the longest agreement."""
    at = _like_next(lines)
    return None if at is None else lines[at]


def _like_next(calls: Sequence[Hashable]) -> int | None:
    for length in range(min(_CONTEXT, len(calls) - 1), 0, -1):
        for at in range(len(calls) - length - 1, -1, -1):
            if calls[at : at + length] == calls[len(calls) - length :]:
                return at + length
    return None


def expected_call(calls: Sequence[Hashable]) -> int | None:
    """An earlier call like the one that is due after `calls`, if they have repeated so far."""
    for end in range(len(calls) - _CONFIRMED, len(calls)):
        at = _like_next(calls[: max(0, end)])
        if at is None or calls[at] != calls[end]:
            return None
    return _like_next(calls)


def unexpected_calls(calls: Sequence[Hashable]) -> list[tuple[int, int]]:
    """The calls at which the repetition so far broke, each with one like the call that was due."""
    due = ((at, expected_call(calls[:at])) for at in range(len(calls)))
    return [(at, like) for at, like in due if like is not None and calls[at] != calls[like]]


# -- ranks that wait for each other ----------------------------------------------------------------


def off_pattern(groups: Sequence[GroupRecords]) -> list[tuple[Wait, Wait]]:
    """Calls that were not the ones due by the repetition of the rank's own, each with one like the
    call that was due. Either one rank alone made a call of its loop out of turn, or some ranks, at
    most half of those there, made one otherwise than before on the same line."""
    there = defaultdict[tuple[int, str], set[Process]](set)
    breaks = defaultdict[tuple[str, str], dict[Process, tuple[int, Wait, Wait]]](dict)
    for process in {member.process for group in groups for member in group.ranks}:
        placed = _placed_calls(groups, process)
        for place, call in placed:
            there[place, line_of(call.record.site)].add(process)
        for thread in {call.record.thread for _, call in placed}:
            own = [each for each in placed if each[1].record.thread == thread][-LONGEST_PATTERN:]
            lines = [line_of(call.record.site) for _, call in own]
            for at, like in unexpected_calls([call.kind() for _, call in own]):
                if lines[at] in lines[:at]:  # every program leaves its loops for new lines
                    pair = *own[at], own[like][1]
                    breaks[lines[at], lines[like]].setdefault(process, pair)
    blamed = []
    for (line, due), odd in breaks.items():
        place = next(iter(odd.values()))[0]
        are_few = 2 * len(odd) <= len(there[place, line] | odd.keys())
        if are_few if line == due else len(odd) == 1:
            blamed.append(odd)
    if len({frozenset(odd) for odd in blamed}) != 1:
        return []
    pairs = [(call, due) for _, call, due in blamed[0].values()]
    return sorted(pairs, key=lambda pair: pair[0].member.global_rank)


def _placed_calls(groups: Sequence[GroupRecords], process: Process) -> list[tuple[int, Wait]]:
    """The calls of a process, each with how many it had made by then in all groups: the same number
    on ranks that do the same."""
    calls = calls_of(groups, process)
    counts: dict[tuple[int, int], int] = {}
    placed = []
    for call in calls:
        counts.setdefault(_ring_of(call), call.record.number - 1)
    for call in calls:
        counts[_ring_of(call)] = call.record.number
        placed.append((sum(counts.values()), call))
    return placed


def _ring_of(call: Wait) -> tuple[int, int]:
    """The calls that make groups are counted with the world's."""
    device, inode = call.group.segment
    return device, max(inode, -1 - inode)


def outvoted(groups: Sequence[GroupRecords], circle: Sequence[Wait]) -> list[Wait]:
    """The calls of the ranks that entered one of two groups while most members of both entered the
    other."""
    segments = {wait.group.segment for wait in circle}
    both = [group for group in groups if group.segment in segments]
    if len(both) != 2 or any(wait.record.call is None for wait in circle):
        return []
    common = set.intersection(*({member.process for member in group.ranks} for group in both))
    entered = [waits(both, process) for process in common]
    odd = find_minority([own[0].group.segment if len(own) == 1 else None for own in entered])
    return sorted((entered[at][0] for at in odd), key=lambda wait: wait.member.global_rank)
