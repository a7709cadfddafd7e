"""Calls that differ: which rank called something else, made a call more, or left one out.

Calls that differ are a mismatch, unless the records show why: two threads made them, or the ranks
are shifted, as their lines or their steps tell.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from unisono.comm.on_rows.mismatches import Mismatch, PairwiseSizes, find_majority, find_minority
from unisono.comm.shared_memory.records import GroupRecords, Record
from unisono.errors import name_ranks
from unisono.watch.alignment import LONGEST_PATTERN, LineShift, expected_call, find_shift
from unisono.watch.calls import by_number, call_name, describe_call, line_of
from unisono.watch.report import (
    Report,
    add_history,
    describe_rank,
    name_rank,
    report_about,
    with_global,
)
from unisono.watch.steps import Shift, Steps, sentence, step_name
from unisono.watch.whereabouts import Ask

_BALANCE = 1 << 24
_MOST_SIDES = 3
"""How many kinds of calls a sentence lists."""


def mismatch(groups: Iterable[GroupRecords]) -> Report | None:
    """The first call for which records show that ranks called different things."""
    for group in groups:
        for number, records in by_number(group).items():
            # our own engine compares calls itself, and knows more than the record
            has_refused = any(record.status == "MISMATCH" for record in records.values())
            if group.backend == "unisono" and not has_refused:
                continue
            if len({describe_call(made, group.backend) for made in records.values()}) > 1:
                found = _mismatch(group, number, records)
                found = _of_threads(group, found, records) or shifted(group, found)
                return add_history(found, [group])
    return None


def with_stacks(report: Report, group: GroupRecords, ask: Ask) -> Report:
    """The report of a mismatch with where all ranks are now; most are still in that call."""
    calls = {rank.rank: rank.calls for rank in report.ranks}
    ranks = [describe_rank(member, ask(member.process), arrived=True) for member in group.ranks]
    ranks = [replace(rank, calls=calls.get(rank.rank, ())) for rank in ranks]
    return replace(report, ranks=tuple(ranks))


def _of_threads(group: GroupRecords, found: Report, records: dict[int, Record]) -> Report | None:
    """What was `found`, if two threads call on one group: their order is then random. (Torch's own
    threads also call, in the order of the program; their calls have no line.)"""
    by_thread: dict[tuple[bool, str], list[int]] = {}
    for rank, record in records.items():
        if record.site:
            key = record.thread == 1, f"{call_name(record)} at {line_of(record.site)}"
            by_thread.setdefault(key, []).append(rank)
    if len({is_main for is_main, _ in by_thread}) < 2:
        return None
    parts = [
        f"{name_ranks(ranks)} made {call} in {'the main' if is_main else 'another'} thread"
        for (is_main, call), ranks in sorted(by_thread.items())
    ]
    return replace(
        found,
        kind="threads",
        verdict=with_global(
            group, f"two threads make calls on group {group.name}: {', '.join(parts)}"
        ),
        culprits=tuple(sorted(records)),
        site=line_of(next(r.site for r in records.values() if r.site and r.thread != 1)),
        details=(
            "calls of a group must have the same order on all ranks: give the thread its own group",
            *found.details,
        ),
    )


def _mismatch(group: GroupRecords, number: int, records: dict[int, Record]) -> Report:
    everybody = [records.get(rank) for rank in range(group.size)]
    calls = [describe_call(made, group.backend) if made else None for made in everybody]
    sites = [made.site if made else None for made in everybody]
    culprits = find_minority(calls) or _off_pattern(group, number)
    on_host = {member.rank: member.host for member in group.ranks}
    hosts = [on_host.get(rank, "") for rank in range(group.size)]
    text = Mismatch(calls, sites, culprits, None, hosts).numbered(number, group.name)
    verdict, *details = text.splitlines()
    sides: dict[str, list[int]] = {}
    for rank, record in records.items():
        at = f" at {line_of(record.site)}" if record.site else ""
        sides.setdefault(f"called {calls[rank]}{at}", []).append(rank)
    if culprits:
        odd = next(did for did, ranks in sides.items() if culprits[0] in ranks)
        rest = next(rank for rank in records if rank not in culprits)
        others = "the others" if find_majority(calls) else name_ranks({*records} - {*culprits})
        before = "" if find_majority(calls) else ", as before"
        where = f"where {others} called {calls[rest]}{before}"
        verdict = f"{name_ranks(culprits)} {odd} {where}: call #{number} of group {group.name}"
    elif len(sides) <= _MOST_SIDES:
        did = ", ".join(f"{name_ranks(ranks)} {what}" for what, ranks in sides.items())
        verdict = f"{did}: call #{number} of group {group.name}"
    first = records[culprits[0]] if culprits else next(iter(records.values()))
    ranks = [name_rank(member, member.rank in records) for member in group.ranks]
    lines = [line.strip() for line in details[:-1]]
    return report_about(
        group, "mismatch", verdict, first, culprits or sorted(records), lines, ranks
    )


def _off_pattern(group: GroupRecords, number: int) -> list[int]:
    """If the calls have repeated so far: the ranks whose call is not the one that is due, unless no
    rank made that one."""

    def kind(record: Record) -> tuple[str, str]:
        return line_of(record.site), describe_call(record, group.backend)

    table = by_number(group)
    before = [kind(next(iter(table[at].values()))) for at in table if at < number]
    due = expected_call(before := before[-LONGEST_PATTERN:])
    calls = {rank: kind(record) for rank, record in table[number].items()}
    if due is None or before[due] not in calls.values():
        return []
    return [rank for rank, call in calls.items() if call != before[due]]


def shifted(group: GroupRecords, found: Report) -> Report:
    """Calls often differ because a rank made one more, or one less, long before: then that is the
    verdict, and what was found is a detail. Lines say which call; steps show that one is missing
    where all lines are alike."""
    by_lines, by_steps = find_shift(group), Steps().look(group)
    if by_steps and (by_lines is None or by_steps.first + max(by_steps.counts) <= by_lines.number):
        verdict = _in_step(group, by_steps)
    elif by_lines is not None:
        verdict = replace(_by_lines(group, by_lines), waited_s=found.waited_s)
    else:
        return found
    details = (*verdict.details, found.verdict, *found.details)
    return replace(verdict, details=details, ranks=found.ranks)


def shifted_by_lines(group: GroupRecords) -> Report | None:
    """A rank that is certainly shifted, by the lines of its calls, although no call failed."""
    shift = find_shift(group)
    if shift is None or not shift.is_certain:
        return None
    return add_history(_by_lines(group, shift), [group])


def shifted_in_step(group: GroupRecords, steps: Steps) -> Report | None:
    """The step in which one rank made more or fewer calls than the others, if there is one."""
    shift = steps.look(group)
    return None if shift is None else add_history(_in_step(group, shift), [group])


def _by_lines(group: GroupRecords, shift: LineShift) -> Report:
    said, first = shift.sentence(group.name), shift.calls[0]
    found = report_about(group, "apart", said, first, [shift.rank], shift.window)
    return replace(found, call=shift.number)


def _in_step(group: GroupRecords, shift: Shift) -> Report:
    details = [
        f"rank {rank}: {count} calls in {step_name(shift)}, from #{shift.first}"
        for rank, count in enumerate(shift.counts)
    ]
    who, verdict = shift.odd or range(group.size), sentence(group, shift)
    found = report_about(group, "apart", verdict, shift.examples[0], who, details)
    return replace(found, call=shift.first)


def unbalanced(group: GroupRecords) -> int | None:
    """The number of the first all_to_all of another library whose parts do not fit, by the
    records."""
    for number, records in by_number(group).items():
        is_whole = len(records) == group.size and group.backend != "unisono"
        splits = [record.balance for record in records.values() if record.operation == "all_to_all"]
        if is_whole and len(splits) == group.size and sum(splits) % _BALANCE:
            return number
    return None


def unequal_splits(group: GroupRecords, number: int, sizes: PairwiseSizes | None) -> Report:
    """Ranks that do not send in an all_to_all what their peers expect; with `sizes` if all ranks
    told theirs."""
    records = by_number(group)[number]
    culprits = sizes.culprits() if sizes is not None else []
    first = records[culprits[0] if culprits else 0]
    name = f"{call_name(first)} of group {group.name} ({line_of(first.site)})"
    verdict = f"what ranks send in {name} is not what others expect"
    details: list[str] = []
    if sizes is not None:
        odd = f"{name_ranks(culprits)} differs from the others: " if len(culprits) == 1 else ""
        verdict = f"parts of {name} do not fit: {odd}{sizes.verdict()}"
        details = [f"rank {rank}: {sizes.of_rank(rank)}" for rank in range(group.size)]
    who = culprits or range(group.size)
    return add_history(report_about(group, "mismatch", verdict, first, who, details), [group])
