"""The text of errors about messages: what ranks wait for, and what is there instead."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.comm.engine import Group, Waiting


def read_waiting(group: Group, rank: int) -> Waiting | None:
    """The message that a rank waits for, or waited for when the group ended; None: it waits for no
    message, or has not waited for long."""
    fields = group.waiting(rank)
    return None if fields is None else Waiting(*fields)


def describe_message(sends: bool, peer: int, tag: int) -> str:
    """A message as its rank sees it."""
    return f"{'send to' if sends else 'recv from'} rank {peer if peer >= 0 else 'any'} (tag {tag})"


def describe_unmatched(count: int, tag: int, source: int) -> str:
    """Messages that are there, but have other tags than the one that is waited for."""
    of = f"of rank {source} " if source >= 0 else ""
    if count == 1:
        return f"a message {of}is here with tag {tag}"
    return f"{count} messages {of}are here with other tags, the oldest with tag {tag}"


def describe_waiting(waiting: Waiting) -> str:
    """What a rank waits for, and which messages of that peer it has got instead."""
    text = describe_message(bool(waiting.sends), waiting.peer, waiting.tag)
    if not waiting.unmatched:
        return text
    instead = describe_unmatched(waiting.unmatched, waiting.unmatched_tag, waiting.peer)
    return f"{text}, but {instead}"


def timeout_details(group: Group, sends: bool, peer: int) -> list[str]:
    """Why a message of this rank may not have been matched: what it has got from the peer instead,
    and what the peer itself waits for."""
    details = []
    count, tag = (0, 0) if sends else group.unmatched(peer)
    if count:
        details.append(f"  {describe_unmatched(count, tag, peer)}")
    waiting = read_waiting(group, peer) if peer >= 0 else None
    if waiting is not None:
        details.append(f"  rank {peer} waits in {describe_waiting(waiting)}")
    return details


def deadlock_circle(group: Group, first: int) -> list[int]:
    """The ranks that wait for each other, from `first` on."""
    circle: list[int] = []
    rank = first
    while rank not in circle:
        circle.append(rank)
        waiting = read_waiting(group, rank)
        if waiting is None or waiting.peer < 0:
            break
        rank = waiting.peer
    return circle


def deadlock_text(
    group: Group, name: str, circle: Sequence[int], sites: Sequence[str | None]
) -> str:
    """The text of a `DeadlockError`."""
    waits = [read_waiting(group, rank) for rank in circle]
    lines = []
    for rank, waiting, site in zip(circle, waits, sites, strict=True):
        doing = "went on" if waiting is None else describe_waiting(waiting)
        lines.append(f"  rank {rank}: {doing}{f' at {site}' if site else ''}")
    verdict = " -> ".join(map(str, [*circle, circle[0]]))
    advice = _advice([waiting for waiting in waits if waiting is not None])
    return "\n".join(
        [f"deadlock in group {name}: ranks {verdict} wait for each other", *lines, advice]
    )


def _advice(waits: Sequence[Waiting]) -> str:
    if any(waiting.unmatched for waiting in waits):
        return "A recv takes messages with its own tag alone: give both sides the same tag."
    if not any(waiting.sends for waiting in waits):
        return "Everybody receives and nobody has sent: let one side send first."
    if any(waiting.sends and not waiting.is_started for waiting in waits):
        return "A send waits until it is received: let one side receive first, or use isend."
    return "A send is over once it is received: start the receives before you wait for it."
