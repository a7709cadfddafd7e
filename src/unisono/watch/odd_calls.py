"""Of ranks that wait for each other, those whose calls tell that they are to blame.

Being in the cycle is no evidence: a healthy rank waits in it, too. So the calls of all ranks are
compared, in all groups. Without a difference between them no rank is named.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from unisono.comm.on_rows.mismatches import find_minority
from unisono.comm.shared_memory.records import GroupRecords, Process
from unisono.watch.alignment import unexpected_calls
from unisono.watch.calls import Wait, calls_of, line_of, waits
from unisono.watch.differences import LONGEST_PATTERN


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
