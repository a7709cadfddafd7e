"""From records to a verdict: which rank, which call, which line.

Everything comes from the records and from `ask`, which says where a process is. The verdict is
found in this order: ranks that called different things; ranks whose calls are shifted (one made a
call more, or left one out, as their lines show); then, from the waiting call, the ranks that it
waits for, and those that they wait for, until a rank is found that waits for no other, or a cycle.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from unisono.cases.primitives import primitive_of
from unisono.comm.on_rows.mismatches import Mismatch, PairwiseSizes, find_majority, find_minority
from unisono.comm.shared_memory.error_texts import stalled_ranks, with_global_ranks
from unisono.comm.shared_memory.records import GroupRecords, Process, RankRecords, Record
from unisono.errors import name_ranks, plural
from unisono.watch.alignment import LineShift, expected_call, find_shift, unexpected_calls
from unisono.watch.calls import (
    IN_FLIGHT,
    PARTLY_HERE,
    Wait,
    by_number,
    call_name,
    calls_of,
    describe_call,
    find_member,
    last_call_number,
    line_of,
    newest_calls,
    waits,
)
from unisono.watch.report import RankReport, Report, add_history
from unisono.watch.steps import Shift, Steps, sentence, step_name


@dataclass(frozen=True)
class Whereabouts:
    """Where a process is. `state` is set if it cannot go on: it has ended, or is stopped.

    `location` is its line ("data.py:41 in load"), `doing` what that line calls, `in_call` whether
    its stack is inside a communication library; `source` are the lines around `location`, `callers`
    the user's lines that led there, the nearest first. `phase` is its part of the iteration.
    `notes` are about its children, and threads that died; `is_abandoned`: it waits, perhaps for one
    of these. `is_described` unless no process of its host says more.
    """

    state: str = ""
    location: str = ""
    doing: str = ""
    in_call: bool = True
    stack: tuple[str, ...] = ()
    source: tuple[str, ...] = ()
    callers: tuple[str, ...] = ()
    phase: str = ""
    notes: tuple[str, ...] = ()
    is_abandoned: bool = False
    is_described: bool = True


Ask = Callable[[Process], Whereabouts]
_BALANCE = 1 << 24
_LONGEST_PATTERN = 64
"""In how many calls a repetition is looked for."""
_MOST_SIDES = 3
"""How many kinds of calls a sentence lists."""
_ENDED = ("has ended", "left the group", "exited with code 0")
"""How a process ends that has finished its program."""
_ASK_FOR_BRANCH = "is the call inside an `if rank`, or a loop that is shorter on that rank?"


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
                found = _of_threads(group, found, records) or _shifted(group, found)
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
        verdict=_global(group, f"two threads make calls on group {group.name}: {', '.join(parts)}"),
        culprits=tuple(sorted(records)),
        site=line_of(next(r.site for r in records.values() if r.site and r.thread != 1)),
        details=(
            "calls of a group must have the same order on all ranks: give the thread its own group",
            *found.details,
        ),
    )


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
    return add_history(_report(group, "mismatch", verdict, first, who, details), [group])


def _shifted(group: GroupRecords, found: Report) -> Report:
    """Calls often differ because a rank made one more, or one less, long before: then that is the
    verdict, and what was found is a detail. Lines say which call; steps show that one is missing
    where all lines are alike."""
    by_lines, by_steps = find_shift(group), Steps().look(group)
    if by_steps and (by_lines is None or by_steps.first + max(by_steps.counts) <= by_lines.number):
        verdict = _in_step(group, by_steps)
        details = (*verdict.details, found.verdict, *found.details)
        return replace(verdict, details=details, ranks=found.ranks)
    return found if by_lines is None else _apart(group, by_lines, found)


def _apart(group: GroupRecords, shift: LineShift, found: Report | None = None) -> Report:
    """A rank whose calls are shifted, and what was `found` because of that."""
    verdict = _report(group, "apart", shift.sentence(group.name), shift.calls[0], [shift.rank])
    verdict = replace(verdict, call=shift.number, details=shift.window)
    if found is None:
        return verdict
    details = (*shift.window, found.verdict, *found.details)
    return replace(verdict, details=details, ranks=found.ranks, waited_s=found.waited_s)


def shifted_by_lines(group: GroupRecords) -> Report | None:
    """A rank that is certainly shifted, by the lines of its calls, although no call failed."""
    shift = find_shift(group)
    if shift is None or not shift.is_certain:
        return None
    return add_history(_apart(group, shift), [group])


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
    ranks = [_named(member, member.rank in records) for member in group.ranks]
    lines = [line.strip() for line in details[:-1]]
    return _report(group, "mismatch", verdict, first, culprits or sorted(records), lines, ranks)


def _off_pattern(group: GroupRecords, number: int) -> list[int]:
    """If the calls have repeated so far: the ranks whose call is not the one that is due, unless no
    rank made that one."""

    def kind(record: Record) -> tuple[str, str]:
        return line_of(record.site), describe_call(record, group.backend)

    table = by_number(group)
    before = [kind(next(iter(table[at].values()))) for at in table if at < number]
    due = expected_call(before := before[-_LONGEST_PATTERN:])
    calls = {rank: kind(record) for rank, record in table[number].items()}
    if due is None or before[due] not in calls.values():
        return []
    return [rank for rank, call in calls.items() if call != before[due]]


def _report(
    group: GroupRecords,
    kind: str,
    verdict: str,
    record: Record,
    culprits: Iterable[int],
    details: Iterable[str] = (),
    ranks: Iterable[RankReport] = (),
) -> Report:
    """A report about a call of a group, as `record` shows it."""
    return Report(
        kind,
        _global(group, verdict),
        group.name,
        group.backend,
        record.operation,
        record.call,
        tuple(culprits),
        line_of(record.site),
        details=tuple(_global(group, line) for line in details),
        ranks=tuple(ranks) or _all_ranks(group),
    )


def shifted_in_step(group: GroupRecords, steps: Steps) -> Report | None:
    """The step in which one rank made more or fewer calls than the others, if there is one."""
    shift = steps.look(group)
    return None if shift is None else add_history(_in_step(group, shift), [group])


def _in_step(group: GroupRecords, shift: Shift) -> Report:
    details = [
        f"rank {rank}: {count} calls in {step_name(shift)}, from #{shift.first}"
        for rank, count in enumerate(shift.counts)
    ]
    who, verdict = shift.odd or range(group.size), sentence(group, shift)
    found = _report(group, "apart", verdict, shift.examples[0], who, details)
    return replace(found, call=shift.first)


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
        if where.state or not where.in_call:
            return path, rank
        passed = [step.member.process for step in path]
        if other.process in passed:
            circle = circle or path[passed.index(other.process) :]
            continue
        own = waits(groups, other.process) or _just_failed(groups, other.process)
        further = [following for following in own if following.missing()]
        further = [known for known in further if not known.is_for_anybody()] or further
        if not further:
            return path, rank
        for following in further:
            found, culprit = _follow(groups, following, ask_once, path)
            if culprit is not None:
                return found, culprit
            circle = circle or found
    return circle, None


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
    who = [wait.member.global_rank for wait in ordered]
    entered = [
        f"{_title(wait.member)} is in {_with_line(wait, _at(wait, ask_once))}" for wait in ordered
    ]
    kinds = {"calls" if wait.record.tag is None else "messages" for wait in circle}
    what = " and ".join(sorted(kinds))
    if what != "messages" and len({wait.group.segment for wait in circle}) > 1:
        what += " of different groups, entered in a different order"
    verdict = f"{name_ranks(who)} wait for each other in {what}: {', '.join(entered)}"
    culprits, site = who, _at(ordered[-1], ask_once)
    if (pair := _first_off_pattern(groups, ordered)) is not None:
        odd, due = pair
        culprits, site = [odd.member.global_rank], line_of(odd.record.site)
        due = replace(due, record=replace(due.record, call=None))
        made = f"rank {culprits[0]} made {_with_line(odd, site)}"
        instead = _with_line(due, line_of(due.record.site))
        verdict = f"{made} where {instead} was due, as before; now {verdict}"
    ranks = [_rank(wait.member, wait, ask_once, arrived=True) for wait in ordered]
    found = _report(stuck.group, "cycle", "", stuck.record, culprits, ranks=ranks)
    return replace(found, verdict=verdict, site=site, waited_s=stuck.waited_s())


def _first_off_pattern(
    groups: Sequence[GroupRecords], circle: Sequence[Wait]
) -> tuple[Wait, Wait] | None:
    """If one rank alone made calls, in any group, that were not the ones due by the repetition of
    its own: the first, and one like the call that was due."""
    breaks: dict[tuple[str, str], list[tuple[Wait, Wait]]] = {}
    for wait in circle:
        calls = [
            call
            for call in calls_of(groups, wait.member.process)
            if call.record.thread == wait.record.thread
        ][-_LONGEST_PATTERN:]
        for at, like in unexpected_calls([call.kind() for call in calls]):
            pair = calls[at], calls[like]
            lines = line_of(pair[0].record.site), line_of(pair[1].record.site)
            breaks.setdefault(lines, []).append(pair)
    # all ranks leave the loops of one program at the same lines
    own = [pairs[0] for pairs in breaks.values() if len({p[0].member.process for p in pairs}) == 1]
    return own[0] if len({odd.member.process for odd, _ in own}) == 1 else None


def _missing(last: Wait, culprit: int, ask_once: Ask, path: Sequence[Wait]) -> Report:
    group, record = last.group, last.record
    missing = last.missing()
    ranks = []
    for rank in range(group.size):
        member = find_member(group, rank)
        if member is None:
            ranks.append(RankReport(rank, rank, 0, False, state="never joined the group"))
        elif rank in missing or _is_in(member, record) or record.tag is None:
            ranks.append(_rank(member, last, ask_once, rank not in missing))
    odd = next((member for member in ranks if member.rank == culprit), ranks[0])
    who = [
        member.rank for member in ranks if member.rank in missing and member.where() == odd.where()
    ]
    are_known = not odd.pid or ask_once((odd.host, odd.pid)).is_described
    verb = "never reached" if are_known else "never finished"
    if record.tag is not None:
        told = find_member(group, odd.rank)
        match = "never posted the match for" if are_known or (told and _is_told(told)) else verb
        verb = f"{match} rank {last.member.rank}'s"
    it = f"it {odd.where()}" if len(who) == 1 else f"they {plural(odd.where())}"
    call = _with_line(last, _at(last, ask_once))
    verdict = f"{name_ranks(who)}{_on_host(group, who)} {verb} {call}: {it}"
    if odd.state and are_known:
        verdict += f" after {odd.last or '0 calls'}"
    newest = (find_member(group, odd.rank) or last.member).records[-1:]
    cut = [call for call in newest if "killed" in odd.state and call.state in IN_FLIGHT]
    if cut and are_known:
        verdict += f", in {call_name(cut[0])} ({line_of(cut[0].site)})"
    trails = {
        member.rank: _trail(group, member)
        for member in group.ranks
        if not (ask_once(member.process).is_described or _is_told(member))
        and " at " not in member.reason
    }
    trail, line = trails.get(odd.rank, ("", ""))
    verdict += trail if len(who) == 1 else ""
    ranks = [replace(rank, state=rank.state + trails.get(rank.rank, ("",))[0]) for rank in ranks]
    details = [
        f"rank {rank.rank}'s {note}"
        for rank in ranks
        if rank.rank in who and rank.pid
        for note in ask_once((rank.host, rank.pid)).notes
    ]
    if odd.state in _ENDED and record.tag is None and are_known:
        details.append(_ASK_FOR_BRANCH)
    kind = "lost" if odd.state else "hang"
    found = _report(group, kind, verdict, record, who, details, ranks)
    waiting = [f"rank {step.member.global_rank} waits in {step}" for step in path[:-1]]
    found = replace(
        found,
        site=line_of(cut[0].site if cut and are_known else odd.place)
        or line
        or line_of(odd.last.partition("(")[2].rstrip(")")),
        waited_s=path[0].waited_s(),
        details=(*waiting, *found.details),
    )
    return _shifted(group, found)


def _is_told(member: RankRecords) -> bool:
    """Whether its records are all there are, as those of a dump: nothing came after them."""
    return bool(member.records) and not member.heard_s


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
    return f"; {how} {_with_line(call_name(last), line and line + on)}", line


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
        verdict = f"{who} came to {_with_line(wait, at)} and stopped moving data: "
        verdict += ("it " if len(stopped) == 1 else "the first ") + stopped[0].where()
    else:
        verdict = (
            f"every rank here has reached {_with_line(wait, at)}: a rank on another "
            "machine has not, or what they send does not arrive; that machine's watch knows more"
        )
    kind = "stalled" if stopped else "elsewhere"
    found = _report(wait.group, kind, verdict, wait.record, culprits, ranks=ranks)
    return replace(found, site=at, waited_s=wait.waited_s())


def _on_host(group: GroupRecords, ranks: Sequence[int]) -> str:
    """ " on node7" if these ranks are on one host of several."""
    hosts = {member.host for member in group.ranks if member.rank in ranks}
    several = len({member.host for member in group.ranks}) > 1
    return f" on {hosts.pop()}" if several and len(hosts) == 1 else ""


def _at(wait: Wait, ask_once: Ask) -> str:
    """The line of a call, or the current line of its process."""
    return line_of(wait.record.site) or line_of(ask_once(wait.member.process).location)


def _with_line(call: Wait | str, line: str) -> str:
    return f"{call} ({line})" if line else str(call)


def _title(member: RankRecords) -> str:
    on = f" on {member.host}" if member.host else ""
    return f"rank {member.global_rank}{on}"


def _global(group: GroupRecords, text: str) -> str:
    """A text about ranks of a group, with their global ranks if those differ."""
    if len(group.ranks) < group.size:
        return text
    return with_global_ranks(text, [member.global_rank for member in group.ranks])


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


def _is_in(member: RankRecords, record: Record) -> bool:
    return any(other.call == record.call and other.state in IN_FLIGHT for other in member.records)


def _rank(member: RankRecords, wait: Wait, ask_once: Ask, arrived: bool) -> RankReport:
    where = ask_once(member.process)
    flying = [record for record in member.records if record.state in IN_FLIGHT]
    elsewhere = call_name(flying[0]) if flying and where.in_call else ""
    return describe_rank(member, where, arrived, str(wait) if arrived else elsewhere)


def describe_rank(
    member: RankRecords, where: Whereabouts, arrived: bool, call: str = ""
) -> RankReport:
    """A rank, its line, and its call."""
    _, at, line = member.reason.rpartition(" at ")
    return replace(
        _named(member, arrived),
        state=member.reason or where.state,
        place=line if at else where.location,
        doing=where.doing,
        call=call,
        last=_last_of(member),
        stack=where.stack,
        source=where.source,
        callers=where.callers,
    )


def _named(member: RankRecords, arrived: bool) -> RankReport:
    """A rank of which only the number is known."""
    return RankReport(member.rank, member.global_rank, member.pid, arrived, host=member.host)


def _all_ranks(group: GroupRecords) -> tuple[RankReport, ...]:
    """The ranks of a group, waiting or not."""
    return tuple(
        replace(_named(member, arrived=False), last=_last_of(member)) for member in group.ranks
    )


def _last_of(member: RankRecords) -> str:
    """The newest call or message that a rank has finished, if that is known."""
    over = [record for record in member.records if record.state == "finished"]
    if not over or member.heard_s:
        return ""
    return _with_line(call_name(over[-1]), line_of(over[-1].site))
