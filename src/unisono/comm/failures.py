"""From the way a group ended to the exception that its ranks raise."""

from __future__ import annotations

from unisono.comm import records
from unisono.comm.engine import Status
from unisono.comm.rendezvous import Place
from unisono.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    DeadlockError,
    GroupAborted,
    GroupError,
    MessageMismatch,
    PeerLost,
)


def describe_failure(place: Place, name: str, doing: str) -> GroupError:
    """The exception for the first fault of a group; `doing` is what this rank was about."""
    group, rank = place.group, place.rank
    status, culprit, call, detail = group.failure()
    calls = [records.describe_post(group, other, call) for other in range(place.size)]
    if status == Status.MISMATCH:
        return CollectiveMismatch(
            records.mismatch_report(name, call, calls),
            rank=rank,
            group=name,
            call=call,
            calls=calls,
            culprits=records.culprits_of(calls),
        )
    if status == Status.TIMEOUT and call == 0:
        return CollectiveTimeout(
            f"rank {culprit} waited in vain for a message in group {name}", rank=rank, group=name
        )
    if status == Status.TIMEOUT:
        arrived = [other for other, what in enumerate(calls) if what is not None]
        missing = [other for other, what in enumerate(calls) if what is None]
        what = next((what for what in calls if what is not None), None)
        return CollectiveTimeout(
            records.timeout_report(name, call, what, arrived, missing),
            rank=rank,
            group=name,
            call=call,
            arrived=arrived,
            missing=missing,
        )
    if status == Status.PEER_CLOSED:
        who = f"rank {culprit}" if culprit >= 0 else "every other rank"
        text = f"{who} closed group {name}; this rank was in {doing}"
        return PeerLost(text, rank=rank, group=name, call=call, peer=culprit)
    if status == Status.PEER_LOST:
        text = (
            f"rank {culprit} (pid {place.members[culprit].pid}) {records.ending(detail)}; "
            f"this rank was in {doing} of group {name}"
        )
        return PeerLost(text, rank=rank, group=name, call=call, peer=culprit)
    if status == Status.UNFIT:
        text = f"a message of rank {culprit} in group {name} did not fit its receiver"
        return MessageMismatch(text, rank=rank, group=name)
    if status == Status.DEADLOCK:
        text, cycle = records.deadlock_report(group, name, culprit)
        return DeadlockError(text, rank=rank, group=name, cycle=cycle)
    text = f"rank {culprit} ended group {name} at call #{call}"
    return GroupAborted(text, rank=rank, group=name, call=call)
