"""From how a group ended to the exception that its ranks raise."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from unisono.comm.engine import ABOUT_MESSAGES, Note, Status
from unisono.comm.meeting.membership import Membership
from unisono.comm.on_rows.mismatches import Mismatch, find_minority
from unisono.comm.shared_memory import error_texts
from unisono.comm.shared_memory.record_reader import read_segment
from unisono.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    DeadlockError,
    GroupAborted,
    GroupError,
    MessageMismatch,
    PeerLost,
    list_ranks,
    name_number,
    name_ranks,
)
from unisono.processes import describe_zombie, state_of

if TYPE_CHECKING:
    from unisono.comm.engine.group_types import Group

SITES_WAIT_S = 0.5
"""How long an error waits for the peers to publish where they are, as they fail."""


def describe_failure(membership: Membership, name: str, doing: str) -> GroupError:
    """The exception for the first fault of a group; `doing` is what this rank was doing."""
    group, rank = membership.group, membership.rank
    status, culprit, call, detail = group.failure()
    if status == Status.MISMATCH:
        return _mismatch(membership, name, call)
    if status == Status.TIMEOUT and call == 0:
        text = f"rank {culprit} waited for a message in group {name} that never came"
        waiting = error_texts.read_waiting(group, culprit)
        if waiting is not None:
            text += f": {error_texts.describe_waiting(waiting)}"
        return CollectiveTimeout(text, rank=rank, group=name)
    if status == Status.TIMEOUT:
        return _timeout(membership, name, call, culprit)
    if status == Status.PEER_CLOSED:
        who = _name_member(membership, culprit) if culprit >= 0 else "every other rank"
        after, own = _how_far(membership, culprit)
        text = f"{who} closed group {name}{after}; this rank was in {doing}{own}"
        return PeerLost(text, rank=rank, group=name, call=call, peer=culprit)
    if status == Status.PEER_LOST:
        return describe_loss(membership, name, doing, culprit, detail, call)
    if status == Status.UNFIT:
        sites = _sites(group, (culprit, detail), ABOUT_MESSAGES)
        text = error_texts.read_unfit(group, name, culprit, detail, sites)
        return MessageMismatch(text, rank=rank, group=name)
    if status == Status.DEADLOCK:
        circle = error_texts.deadlock_circle(group, culprit)
        sites = _sites(group, circle, ABOUT_MESSAGES)
        text = error_texts.deadlock_text(group, name, circle, sites)
        return DeadlockError(text, rank=rank, group=name, cycle=circle)
    if status == Status.DAMAGED:
        reason = "something in its process has overwritten it"
        text = (
            f"rank {culprit}'s part of the shared memory of group {name} is corrupt: {reason}. The "
            "group is over; restart its processes."
        )
        return GroupAborted(text, rank=rank, group=name, peer=culprit, reason=reason)
    reason = _reason(membership, culprit) if culprit >= 0 else ""
    text = f"rank {culprit} ended group {name}" + (f" at call #{call}" if call else "")
    text += f": {reason}" if reason else ""
    return GroupAborted(text, rank=rank, group=name, call=call, peer=culprit, reason=reason)


def describe_loss(
    membership: Membership, name: str, doing: str, peer: int, detail: int, call: int = 0
) -> PeerLost:
    member, how = membership.members[peer], error_texts.describe_ending(detail)
    if not detail and member.is_here:  # its parent may collect it at this moment
        how = describe_zombie(member.pid)
        how = how or error_texts.describe_ending(membership.group.state(peer)["loss"] or 0)
    text = f"rank {peer} ({member}) {how}; this rank was in {doing} of group {name}"
    last_words = membership.group.read_note(peer, Note.REASON, ABOUT_MESSAGES)
    if last_words:
        text = f"{text}\n  rank {peer} {last_words}"
    return PeerLost(text, rank=membership.rank, group=name, call=call, peer=peer)


def whereabouts(
    membership: Membership, ranks: Sequence[int], about: int, stopped: Sequence[int] | None = None
) -> list[str]:
    """A line for each missing rank: where it says that it is, or what the system says. `stopped`
    are ranks known to be stopped."""
    members, read_note = membership.members, membership.group.read_note
    elsewhere = [rank for rank in ranks if not members[rank].is_here]
    if stopped is None:
        stopped = membership.find_stopped() if elsewhere else []
    told = dict.fromkeys(stopped, "is stopped and did not answer")
    for rank in elsewhere:
        answer = None if rank in told else read_note(rank, Note.ANSWER, about)
        if answer:
            told[rank] = f"is at {answer}"
    told |= membership.ask_elsewhere([rank for rank in elsewhere if rank not in told])
    told |= {rank: _on_this_host(membership, rank, about) for rank in ranks if rank not in told}
    return [f"  rank {rank} ({members[rank]}) {told[rank]}" for rank in ranks]


def _on_this_host(membership: Membership, rank: int, about: int) -> str:
    if rank == membership.rank:
        return "is this one"
    state = state_of(membership.members[rank].pid)
    answer = membership.group.read_note(rank, Note.ANSWER, about) or membership.group.read_note(
        rank, Note.ANSWER, 0
    )
    if answer and state.letter != "T":
        return f"is at {answer}"
    return f"{state if state.letter else 'is not visible from here'} and did not answer"


def _how_far(membership: Membership, peer: int) -> tuple[str, str]:
    """After how many calls a rank left, and which call this rank was in; empty if unknown, or if
    this rank was in a message."""
    group = read_segment(membership.group.state()["descriptor"])
    records = {member.rank: member.records for member in group.ranks} if group else {}
    own = records.get(membership.rank, ())[-1:]
    if not own or not own[0].call:
        return "", ""
    at = f" ({own[0].site.partition(' in ')[0]})" if own[0].site else ""
    if peer not in records:
        return "", f" #{own[0].call}{at}"
    made = max((record.call or 0 for record in records[peer]), default=0)
    return f" after {name_number(made, 'call')}", f" #{own[0].call}{at}"


def _name_member(membership: Membership, rank: int) -> str:
    """A rank, with its process and host in a group over several hosts."""
    member = membership.members[rank]
    return f"rank {rank} ({member})" if member.host else f"rank {rank}"


def _mismatch(membership: Membership, name: str, call: int) -> CollectiveMismatch:
    group = membership.group
    calls = _posts(membership, call)
    arrived = [rank for rank, what in enumerate(calls) if what is not None]
    by_rank = dict(zip(arrived, _sites(group, arrived, call), strict=True))
    sites = [by_rank.get(rank) for rank in range(membership.size)]
    culprits, pairs = find_minority(calls), None
    if len(set(calls)) == 1:  # then the sizes of pairs, or the shapes, differ
        pairs = error_texts.read_pairwise_sizes(group, membership.size, call)
        if pairs is not None:
            culprits = pairs.culprits()
        else:
            shapes = [
                error_texts.describe_shape(group, rank, call) for rank in range(membership.size)
            ]
            culprits = find_minority([mark for mark, _ in shapes])
            calls = [f"{what}{text}" for what, (_, text) in zip(calls, shapes, strict=True)]
    found = Mismatch(calls, sites, culprits, pairs, [member.host for member in membership.members])
    return found.error(found.numbered(call, name), membership.rank, name, call)


def _timeout(membership: Membership, name: str, call: int, awaited: int) -> CollectiveTimeout:
    """`awaited` is the rank that the first rank to time out was waiting for."""
    group, ranks = membership.group, range(membership.size)
    posted = {
        rank: what for rank in ranks if (what := error_texts.describe_post(group, rank, call))
    }
    missing = [rank for rank in ranks if rank not in posted]
    what = next(iter(posted.values()), "a call")
    text = f"{what} (call #{call} of group {name}) reached its timeout "
    stalled: list[int] = []
    partner = membership.partner_elsewhere(awaited)
    stopped = None if partner is None else membership.find_stopped()
    missing = [rank for rank in missing if rank not in membership.unheard(stopped or [])]
    if missing:
        here = list_ranks(list(posted)) or "none"
        text += f"because {name_ranks(missing)} never arrived; arrived: {here}"
    else:
        text += "although all ranks arrived: "
        stalled = _stalled(membership, awaited) if stopped is None else stopped
        if stalled:
            text += f"{name_ranks(stalled)} stopped moving data"
        elif partner is not None:
            pair = [_name_member(membership, rank) for rank in sorted((awaited, partner))]
            text += (
                f"{' and '.join(pair)} have both arrived, but the data between them does not get "
                "through, though short messages do. The network drops large packets (compare the "
                "MTU of all interfaces; try ping -M do -s 1472), or is too slow for this timeout"
            )
    where = whereabouts(membership, missing or stalled, call, stopped)
    if stalled:  # a stopped process cannot report its line, but it is in our own call
        (site,) = _sites(group, [membership.rank], call)
        where = [f"{line}; the call is at {site}" if site else line for line in where]
    return CollectiveTimeout(
        "\n".join([text, *where]),
        rank=membership.rank,
        group=name,
        call=call,
        arrived=list(posted),
        missing=missing,
        stalled=stalled,
    )


def _stalled(membership: Membership, awaited: int) -> list[int]:
    """The ranks that hold up the others of their host in a call that all have begun. (Between
    hosts the network may be late: only a stopped rank is blamed.)"""
    group = membership.group
    progress = [group.state(rank)["progress"] for rank in range(membership.size)]
    stalled = error_texts.stalled_ranks(progress)
    if awaited in stalled:
        return stalled
    return membership.find_stopped() or [awaited]  # it has resumed meanwhile


def _reason(membership: Membership, rank: int) -> str:
    """Why a rank ended the group. From another host the reason may arrive after the end."""
    wait_s = 0.0 if membership.members[rank].is_here else SITES_WAIT_S
    read_note = membership.group.read_note
    return _once_whole(lambda: [read_note(rank, Note.REASON, ABOUT_MESSAGES)], wait_s)[0] or ""


def _posts(membership: Membership, call: int) -> list[str | None]:
    """What the ranks posted for a call, None for those that have not. From another host a
    failure may arrive before the call that failed."""
    is_here = all(member.is_here for member in membership.members)
    group, ranks = membership.group, range(membership.size)
    return _once_whole(
        lambda: [error_texts.describe_post(group, rank, call) for rank in ranks],
        0.0 if is_here else SITES_WAIT_S,
    )


def _sites(group: Group, ranks: Iterable[int], about: int) -> list[str | None]:
    """Where these ranks made the call that failed. Each publishes it as it fails."""
    ranks = list(ranks)
    return _once_whole(lambda: [group.read_note(rank, Note.SITE, about) for rank in ranks])


def _once_whole(
    read: Callable[[], list[str | None]], wait_s: float = SITES_WAIT_S
) -> list[str | None]:
    """What there is to read, once all of it has arrived, or after a moment."""
    end = time.monotonic() + wait_s
    while None in (found := read()) and time.monotonic() < end:
        time.sleep(0.001)
    return found
