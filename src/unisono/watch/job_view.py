"""The whole job at one moment: the records of all its groups, and where its processes are.

On one host both are read from the system. A job over several hosts has lines between them, on which
each host is asked for its view; times are converted to this host's clock.
"""

from __future__ import annotations

import functools
import math
import operator
import os
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from unisono.comm.shared_memory.group_parts import join_parts, segment_of_key
from unisono.comm.shared_memory.records import GroupRecords, Process, RankRecords, Record
from unisono.watch.calls import of_creations, snapshot
from unisono.watch.report import build
from unisono.watch.stack_server import answer_if_asked, request_stacks
from unisono.watch.whereabouts import Ask, Whereabouts, whereabouts

if TYPE_CHECKING:
    from unisono.comm.hosts.links import Links

_ANSWER_S = 5.0
"""How long a host may take to answer: some of its ranks may be asked twice."""
_FRESH_S = 0.5
EAGER_HOSTS = 8
"""Up to this many hosts every rank asks all others; in larger jobs few do, or later."""
RECORDS, SPLITS, FAREWELL = "records", "splits", "farewell"
_last_seen: dict[tuple[tuple[int, int], int], RankRecords] = {}
"""What was last heard of ranks of groups over hosts, by group and rank, the oldest first."""
_MOST_SEEN = 1024
_TIMES = [at for at, field in enumerate(fields(Record)) if field.name.endswith("_s")]


@dataclass(frozen=True)
class JobView:
    """`groups` have all ranks of all hosts that answered; `where` says where a process is, `me` is
    this one."""

    groups: list[GroupRecords]
    where: Ask
    me: Process


def open_links() -> list[Links]:
    """The connections of this process to other hosts, if its job has any; a world each."""
    module = sys.modules.get("unisono.comm.hosts.links")  # otherwise it has none
    return [links for links in module.all_links if links.is_open()] if module else []


def own_host() -> str:
    """The name of this host in the job; "" if the job has only one."""
    links = open_links()
    return links[0].hosts.names[links[0].hosts.mine] if links else ""


def may_ask() -> bool:
    """Whether this process may ask all hosts when all ranks want to at once: on many hosts only the
    lowest rank of each."""
    return all(
        links.hosts.count <= EAGER_HOSTS or links.me == links.hosts.leader(links.hosts.mine)
        for links in open_links()
    )


def host_number() -> int:
    """The number of this host among those of the job."""
    return max((links.hosts.mine for links in open_links()), default=0)


def look_at_job(
    where: Ask,
    last: int | None,
    *,
    wants_stacks: bool = True,
    with_children: bool = True,
    hurry_s: float = 0.0,
) -> JobView:
    """What all hosts see now. `where` says where a process of this host is, `last` is the number of
    records of each rank; `with_children` interrupts children on other hosts, too. With `hurry_s`,
    not much longer than that."""
    host = own_host()
    here = own_groups(snapshot([os.getpid()], last))
    if wants_stacks:
        request_stacks(member.pid for group in here for member in group.ranks)
    groups = list(here)
    known: dict[Process, Whereabouts] = {}
    for links in open_links():
        asked = {"last": last, "stacks": wants_stacks, "children": with_children}
        limits = (hurry_s, answer_if_asked, 0.0) if hurry_s else (_ANSWER_S, answer_if_asked)
        answers = links.ask_hosts(RECORDS, asked, *limits)
        for number, (peer, answer) in answers.items():
            groups += _hear(links, peer, answer)
            for pid, found in answer["where"].items():
                known[links.hosts.names[number], int(pid)] = build(Whereabouts, found)
        groups = _with_absent(join_parts(groups), links, set(answers), known, bool(hurry_s))

    @functools.cache
    def ask(process: Process) -> Whereabouts:
        if process in known:
            return known[process]
        return where(process) if process[0] == host else Whereabouts()

    return JobView(groups, ask, (host, os.getpid()))


def own_groups(groups: Iterable[GroupRecords]) -> list[GroupRecords]:
    """Groups of this host, with its name if the job has several hosts."""
    host = own_host()
    return [
        replace(group, ranks=tuple(replace(member, host=host) for member in group.ranks))
        for group in groups
    ]


def _with_absent(
    groups: Sequence[GroupRecords],
    links: Links,
    answered: set[int],
    known: dict[Process, Whereabouts],
    in_hurry: bool,
) -> list[GroupRecords]:
    """Groups over hosts, including ranks that no host has described."""
    hosts = links.hosts
    by_segment = {group.segment: group for group in groups}
    known_groups = links.describe_groups()
    keys = [(segment_of_key(described.key), described) for described in known_groups]
    for segment, described in [*keys, *((of_creations(key), group) for key, group in keys)]:
        group = by_segment.get(segment)
        if group is None:
            continue
        told = {member.rank for member in group.ranks}
        absent = []
        for rank, global_rank in enumerate(described.members):
            if rank in told:
                continue
            host = hosts.host_of(global_rank)
            name, pid = hosts.names[host], hosts.pids[global_rank]
            said = "" if in_hurry else links.last_words_of(global_rank)
            seen = _last_seen.get((group.segment, rank))
            seen = seen or RankRecords(rank, global_rank, pid, ())
            said = said or seen.reason
            absent.append(replace(seen, reason=said, host=name))
            why = said or _why_absent(links, global_rank, answered)
            known[name, pid] = Whereabouts(state=why, is_described=False)
        everybody = sorted((*group.ranks, *absent), key=lambda member: member.rank)
        by_segment[group.segment] = replace(group, ranks=tuple(everybody))
    return list(by_segment.values())


def _hear(links: Links, peer: int, told: dict[str, Any]) -> list[GroupRecords]:
    """The groups of another host, as a rank told. Those over hosts are kept: a rank that leaves or
    dies takes its records with it."""
    number = links.hosts.host_of(peer)
    clock = links.questions.read_clock(peer)
    ahead_s = clock[0] if clock is not None else 0.0
    name = links.hosts.names[number]
    groups = [group_from(found, name, number, ahead_s) for found in told["groups"]]
    for group in groups:
        for member in group.ranks if group.is_part else ():
            _last_seen.pop((group.segment, member.rank), None)
            _last_seen[group.segment, member.rank] = replace(member, heard_s=time.monotonic())
    for key in list(_last_seen)[:-_MOST_SEEN]:
        _last_seen.pop(key, None)
    return groups


def say_farewell(last: int, reported: list[Any], timeout_s: float) -> None:
    """Leave this host's records with the others, before this process leaves a group."""
    for links in open_links():
        if links.hosts.count <= EAGER_HOSTS:
            told = _tell({"last": last, "stacks": False}) | {"rank": links.me, "reported": reported}
            links.ask_hosts(FAREWELL, told, timeout_s, draw_s=0.0)


def accept_farewell(told: dict[str, Any]) -> None:
    """A rank of another host leaves a group."""
    for links in open_links()[:1]:
        _hear(links, int(told["rank"]), told)


def _why_absent(links: Links, global_rank: int, answered: set[int]) -> str:
    loss = links.loss_of(global_rank)
    if loss is not None:
        return loss or "has left"
    if not links.may_answer(global_rank):
        return "left the group"
    host = links.hosts.host_of(global_rank)
    if host in answered or host == links.hosts.mine:
        return "has ended, or left the group"
    return f"is on {links.hosts.names[host]}, which is silent"


# -- for other hosts -------------------------------------------------------------------


class Answers:
    """What this host tells others, cached for half a second."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[str, tuple[float, dict[str, Any]]] = {}

    def tell(self, about: dict[str, Any]) -> dict[str, Any]:
        """The groups of this host's processes, and where these are."""
        with self._lock:
            at_s, answer = self._made.get(str(about), (0.0, {}))
            if not about["stacks"] or not answer or time.monotonic() - at_s > _FRESH_S:
                answer = _tell(about)
                self._made[str(about)] = time.monotonic(), answer
            return answer


def _tell(about: dict[str, Any]) -> dict[str, Any]:
    groups = snapshot([os.getpid()], about["last"])
    pids = sorted({member.pid for group in groups for member in group.ranks})
    found = {}
    if about["stacks"]:
        request_stacks(pids)
        found = {pid: asdict(whereabouts(pid, with_children=about["children"])) for pid in pids}
    return {"groups": [describe(group) for group in groups], "where": found}


def describe(group: GroupRecords) -> dict[str, Any]:
    """A group for another host: of each record only the values."""
    ranks = [
        vars(member) | {"records": [[*vars(record).values()] for record in member.records]}
        for member in group.ranks
    ]
    return vars(group) | {"ranks": ranks}


def group_from(found: dict[str, Any], host: str, number: int, ahead_s: float) -> GroupRecords:
    """A group as the `number`-th host has described it, whose clock is ahead of ours by this much
    and whose inodes are not ours."""
    members = []
    for told in found["ranks"]:
        member = build(RankRecords, told | {"records": ()})
        records = tuple(_record_from(values, ahead_s) for values in told["records"])
        members.append(replace(member, records=records, host=host))
    group = build(GroupRecords, found | {"ranks": ()})
    segment = group.segment if group.is_part else (-1 - number, group.segment[1])
    return replace(group, ranks=tuple(members), segment=segment)


def _record_from(values: list[Any], ahead_s: float) -> Record:
    times = [None if values[at] is None else values[at] - ahead_s for at in _TIMES]
    if not _are_of_record(tuple(map(type, values))) or not math.isfinite(sum(filter(None, times))):
        raise TypeError(f"{values!r} is not a record")
    return Record(*values[: _TIMES[0]], *times, *values[_TIMES[-1] + 1 :])


@functools.cache
def _are_of_record(kinds: tuple[type, ...]) -> bool:
    """Whether these are the types of the values of a record."""
    allowed = [get_args(hint) or (hint,) for hint in get_type_hints(Record).values()]
    return len(kinds) == len(allowed) and all(map(operator.contains, allowed, kinds))
