"""Ranks that wait: which rank is to blame, and on which line.

Everything comes from the records and from `ask`, which says where a process is. Calls that differ
explain every wait. Otherwise, from the waiting call, the ranks that it waits for are looked at, and
those that they wait for, until a rank is found that waits for no other, or a cycle.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import replace

from unisono.cases.primitives import primitive_of
from unisono.comm.shared_memory.error_texts import stalled_ranks
from unisono.comm.shared_memory.records import GroupRecords, Process, RankRecords, Record
from unisono.errors import name_ranks, plural
from unisono.watch.alignment import off_pattern, outvoted
from unisono.watch.calls import (
    IN_FLIGHT,
    PARTLY_HERE,
    Wait,
    by_number,
    call_name,
    find_member,
    last_call_number,
    line_of,
    newest_calls,
    waits,
)
from unisono.watch.differences import mismatch, shifted
from unisono.watch.report import (
    RankReport,
    Report,
    add_history,
    describe_rank,
    report_about,
    with_global,
    with_line,
)
from unisono.watch.store_calls import without_numbers
from unisono.watch.whereabouts import Ask, Whereabouts

_ENDED = ("has ended", "left the group", "exited with code 0")
"""How a process ends that has finished its program."""
_NOBODY = "which of them is to blame cannot be told from their calls"
_ASK_FOR_BRANCH = "is the call inside an `if rank`, or a loop that is shorter on that rank?"


def hang(groups: Sequence[GroupRecords], stuck: Wait, ask: Ask) -> Report | None:
    """Why a call waits; None if all ranks are there and make progress."""
    ask_once = functools.cache(ask)
    different = mismatch(groups)
    if different is not None:
        return different
    path, culprit = _follow(groups, stuck, ask_once, [])
    if culprit is not None and len(path) == 1 and stuck.makes_group():
        return None  # absent.py says it
    if culprit is not None:
        found: Report | None = _missing(path[-1], culprit, ask_once, path)
    else:
        found = _cycle(groups, path, stuck, ask_once) if path else _stalled(stuck, ask_once)
    return None if found is None else add_history(found, groups)


def _follow(
    groups: Sequence[GroupRecords], wait: Wait, ask_once: Ask, before: list[Wait]
) -> tuple[list[Wait], int | None]:
    """Follow the waits: the path, and the rank at its end, which the last call needs and which
    waits for no other. Without such a rank, the waits that form a cycle; nothing if all are
    there."""
    path = [*before, wait]
    circle: list[Wait] = []
    for rank in sorted(wait.missing(), key=lambda rank: _blamed_first(wait.group, rank)):
        other = find_member(wait.group, rank)
        if other is None:
            return path, rank
        where = ask_once(other.process)
        if other.reason or where.state or not where.in_call:
            return path, rank
        passed = [step.member.process for step in path]
        if other.process in passed:
            circle = circle or path[passed.index(other.process) :]
            continue
        own = waits(groups, other.process) or _just_failed(groups, other.process)
        further = [following for following in own if following.missing()]
        further = [known for known in further if not known.is_for_anybody()] or further
        if not further or _has_lost_thread(other, where, further):
            return path, rank
        for following in further:
            found, culprit = _follow(groups, following, ask_once, path)
            if culprit is not None:
                return found, culprit
            circle = circle or found
    return circle, None


def _has_lost_thread(member: RankRecords, where: Whereabouts, further: Sequence[Wait]) -> bool:
    """Whether other threads than those that wait now made a rank's calls in a group, and one of its
    threads has failed: then what waits is not why the next call is missing."""
    callers = {record.thread for record in member.records}
    return bool(where.failures and callers) and not any(
        wait.record.thread in callers for wait in further
    )


def _just_failed(groups: Sequence[GroupRecords], process: Process) -> list[Wait]:
    """The newest call of a process if it has failed: a rank that handles the exception had waited,
    too."""
    last = sorted(newest_calls(groups, process), key=lambda wait: wait.record.arrived_s)[-1:]
    return [wait for wait in last if wait.record.state == "failed"]


def _blamed_first(group: GroupRecords, rank: int) -> tuple[bool, int]:
    """The order of missing ranks: first whoever made the fewest calls and has seen none fail."""
    member = find_member(group, rank)
    if member is None:
        return False, 0
    return any(call.state == "failed" for call in member.records[-2:]), last_call_number(member)


def is_certain(report: Report, ask: Ask) -> bool:
    """Whether a hang cannot resolve: a cycle, a rank that has left, a dead thread."""
    if report.kind == "cycle":
        return True
    for rank in report.ranks:
        if rank.rank in report.culprits and rank.pid:
            where = ask((rank.host, rank.pid))
            has_left = report.kind == "lost" and "stopped" not in where.state
            return has_left or (report.kind == "hang" and where.is_abandoned)
    return False


def _cycle(
    groups: Sequence[GroupRecords], circle: Sequence[Wait], stuck: Wait, ask_once: Ask
) -> Report:
    ordered = sorted(circle, key=lambda wait: wait.member.global_rank)
    culprits = [wait.member.global_rank for wait in ordered]
    entered = [f"{_title(wait.member)} is in {_with_its_line(wait, ask_once)}" for wait in ordered]
    kinds = {"calls" if wait.record.tag is None else "messages" for wait in circle}
    what = " and ".join(sorted(kinds))
    if what != "messages" and len({wait.group.segment for wait in circle}) > 1:
        what += " of different groups, entered in a different order"
    verdict = f"{name_ranks(culprits)} wait for each other in {what}: {', '.join(entered)}"
    site, details = _at(ordered[-1], ask_once), [_NOBODY]
    odd_ones = outvoted(groups, ordered)
    if pairs := off_pattern(groups):
        odd_ones = [odd for odd, _ in pairs]
        made = " and ".join(
            f"rank {odd.member.global_rank} made {_with_its_line(odd, ask_once)} where "
            f"{_with_its_line(_without_number(due), ask_once)} was due"
            for odd, due in pairs
        )
        verdict = f"{made}, as before; now {verdict}"
    elif odd_ones:
        who = name_ranks(odd.member.global_rank for odd in odd_ones)
        rest = next(wait for wait in ordered if wait.group.segment != odd_ones[0].group.segment)
        verdict = (
            f"{who} entered {_with_its_line(odd_ones[0], ask_once)} where the others entered "
            f"{_with_its_line(rest, ask_once)}; now {verdict}"
        )
    if odd_ones:
        culprits = [odd.member.global_rank for odd in odd_ones]
        site, details = _at(odd_ones[0], ask_once), []
    ranks = [_rank(wait.member, wait, ask_once, arrived=True) for wait in ordered]
    ranks = [replace(rank, rank=rank.global_rank) for rank in ranks]  # their groups may differ
    found = report_about(stuck.group, "cycle", "", stuck.record, culprits, details, ranks)
    return replace(found, verdict=verdict, site=site, waited_s=stuck.waited_s())


def _without_number(wait: Wait) -> Wait:
    return replace(wait, record=replace(wait.record, call=None))


def _missing(last: Wait, culprit: int, ask_once: Ask, path: Sequence[Wait]) -> Report:
    """Ranks that the last call of a path needs, and that wait for no other."""
    group, missing = last.group, last.missing()
    ranks = _awaited_and_waiting(last, missing, ask_once)
    odd = next((rank for rank in ranks if rank.rank == culprit), ranks[0])
    who = [rank.rank for rank in ranks if rank.rank in missing and rank.where() == odd.where()]
    trails = _trails(group, ask_once)
    trail, line = trails.get(odd.rank, ("", ""))
    ranks = [replace(rank, state=rank.state + trails.get(rank.rank, ("",))[0]) for rank in ranks]
    are_known = not odd.pid or ask_once((odd.host, odd.pid)).is_described
    cut = _cut_call(group, odd) if are_known else None
    call = with_line(last, _at(last, ask_once))
    verdict = f"{name_ranks(who)}{_on_host(group, who)} {_what_not(last, odd, are_known)} {call}: "
    verdict += f"it {odd.where()}" if len(who) == 1 else f"they {plural(odd.where())}"
    if odd.pid and (key := ask_once((odd.host, odd.pid)).key):
        like = without_numbers(key)
        able = [own.rank for own in group.ranks if like in ask_once(own.process).written]
        others = f"{name_ranks(able)} set others like it" if able else "no rank has set one like it"
        verdict += f", for the key {key!r} of torch's Store; {others}"
    if odd.state and are_known:
        verdict += f" after {odd.last or '0 calls'}"
    if cut is not None:
        verdict += f", in {call_name(cut)} ({line_of(cut.site)})"
    if len(who) == 1:
        failures = ask_once((odd.host, odd.pid)).failures if odd.pid else ()
        verdict += "".join(f"; its {failure}" for failure in failures[-1:]) + trail
    details = [
        f"rank {rank.rank}'s {note}"
        for rank in ranks
        if rank.rank in who and rank.pid
        for where in [ask_once((rank.host, rank.pid))]
        for note in (where.failures if len(who) > 1 else ()) + where.notes
    ]
    if odd.state in _ENDED and last.record.tag is None and are_known:
        details.append(_ASK_FOR_BRANCH)
    kind = "lost" if odd.state else "hang"
    found = report_about(group, kind, verdict, last.record, who, details, ranks)
    place = cut.site if cut is not None else odd.place
    site = line_of(place) or line or line_of(odd.last.partition("(")[2].rstrip(")"))
    waiting = [
        f"rank {step.member.global_rank} waits in {with_global(step.group, str(step))}"
        for step in path[:-1]
    ]
    found = replace(found, details=(*waiting, *found.details))
    return shifted(group, replace(found, site=site, waited_s=path[0].waited_s()))


def _awaited_and_waiting(last: Wait, missing: Sequence[int], ask_once: Ask) -> list[RankReport]:
    """The ranks that a call needs, and those in it; of a collective call, all ranks."""
    ranks = []
    for rank in range(last.group.size):
        member = find_member(last.group, rank)
        if member is None:
            ranks.append(RankReport(rank, rank, 0, False, state="never joined the group"))
        elif rank in missing or _is_in(member, last.record) or last.record.tag is None:
            ranks.append(_rank(member, last, ask_once, rank not in missing))
    return ranks


def _what_not(last: Wait, odd: RankReport, are_known: bool) -> str:
    """What a missing rank has not done: completes "rank 1 ... all_reduce #3"."""
    verb = "never reached" if are_known else "never finished"
    if last.record.tag is None:
        return verb
    told = find_member(last.group, odd.rank)
    if are_known or (told is not None and _is_told(told)):
        verb = "never posted the match for"
    return f"{verb} rank {last.member.rank}'s"


def _cut_call(group: GroupRecords, rank: RankReport) -> Record | None:
    """The call in which a rank was killed."""
    member = find_member(group, rank.rank)
    if member is None or not member.records or "killed" not in rank.state:
        return None
    return member.records[-1] if member.records[-1].state in IN_FLIGHT else None


def _is_told(member: RankRecords) -> bool:
    """Whether its records are all there are, as those of a dump: nothing came after them."""
    return bool(member.records) and not member.heard_s


def _trails(group: GroupRecords, ask_once: Ask) -> dict[int, tuple[str, str]]:
    """How far the ranks had come that no process can describe."""
    return {
        member.rank: _trail(group, member)
        for member in group.ranks
        if not (ask_once(member.process).is_described or _is_told(member))
        and " at " not in member.reason
    }


def _trail(group: GroupRecords, member: RankRecords) -> tuple[str, str]:
    """How far a rank had come that no process can describe, and on which line: its newest call when
    its host last told, or a later one that another rank could not have finished without it."""
    last, how, on, known, until_s = None, "it had reached", "", 0, 0.0
    for number, records in by_number(group).items():
        for rank, record in records.items():
            primitive = primitive_of(record.operation)
            has_data = primitive.is_empty or (record.bytes and not primitive.is_pairwise)
            needs_all = primitive.is_meeting and has_data
            if needs_all and (record.state, record.status) == ("finished", "OK"):
                last, on, known, until_s = record, f" on rank {rank}", number, record.ended_s or 0.0
    for seen in member.records[-1:]:
        if last_call_number(member) >= known or seen.arrived_s > until_s:
            last, on = seen, ""
            ago_s = time.monotonic() - member.heard_s
            how = f"last seen {ago_s:.0f} s ago, {'in' if seen.state in IN_FLIGHT else 'after'}"
    if last is None:
        return "", ""
    line = line_of(last.site)
    return f"; {how} {with_line(call_name(last), line and line + on)}", line


def _stalled(wait: Wait, ask_once: Ask) -> Report | None:
    ranks = [_rank(member, wait, ask_once, True) for member in wait.group.ranks]
    behind = _behind(wait)
    stopped = [rank for rank in ranks if rank.rank in behind] or [
        rank for rank in ranks if rank.state and rank.rank != wait.member.rank
    ]
    elsewhere = wait.group.name.endswith(PARTLY_HERE)
    if not stopped and not elsewhere:
        return None
    at, culprits = _at(wait, ask_once), [member.rank for member in stopped]
    if stopped:
        who = name_ranks(culprits) + _on_host(wait.group, culprits)
        verdict = f"{who} came to {with_line(wait, at)} and stopped moving data: "
        verdict += ("it " if len(stopped) == 1 else "the first ") + stopped[0].where()
    else:
        verdict = (
            f"every rank here has reached {with_line(wait, at)}: a rank on another "
            "machine has not, or what they send does not arrive; that machine's watch knows more"
        )
    kind = "stalled" if stopped else "elsewhere"
    found = report_about(wait.group, kind, verdict, wait.record, culprits, ranks=ranks)
    return replace(found, site=at, waited_s=wait.waited_s())


def _behind(wait: Wait) -> list[int]:
    """The ranks that have moved less than the others, if all are in one call of our own engine."""
    group = wait.group
    calls = {
        record.call
        for member in group.ranks
        for record in member.records[-1:]
        if record.state == "moving"
    }
    if group.backend != "unisono" or calls != {wait.record.call}:
        return []
    return stalled_ranks([member.progress for member in group.ranks])


def _rank(member: RankRecords, wait: Wait, ask_once: Ask, arrived: bool) -> RankReport:
    where = ask_once(member.process)
    flying = [record for record in member.records if record.state in IN_FLIGHT]
    elsewhere = call_name(flying[0]) if flying and where.in_call else ""
    return describe_rank(member, where, arrived, str(wait) if arrived else elsewhere)


def _is_in(member: RankRecords, record: Record) -> bool:
    return any(other.call == record.call and other.state in IN_FLIGHT for other in member.records)


def _on_host(group: GroupRecords, ranks: Sequence[int]) -> str:
    """ " on node7" if these ranks are on one host of several."""
    hosts = {member.host for member in group.ranks if member.rank in ranks}
    several = len({member.host for member in group.ranks}) > 1
    return f" on {hosts.pop()}" if several and len(hosts) == 1 else ""


def _at(wait: Wait, ask_once: Ask) -> str:
    """The line of a call, or the current line of its process."""
    return line_of(wait.record.site) or line_of(ask_once(wait.member.process).location)


def _with_its_line(wait: Wait, ask_once: Ask) -> str:
    """For sentences in which ranks are global."""
    return with_line(with_global(wait.group, str(wait)), _at(wait, ask_once))


def _title(member: RankRecords) -> str:
    on = f" on {member.host}" if member.host else ""
    return f"rank {member.global_rank}{on}"
