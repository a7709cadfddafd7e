"""What the ranks of a world over hosts exchange through the store, sealed with a secret.

The secret is derived from the claims of all ranks, which are unpredictable, and UNISONO_JOB_SECRET,
which is not in the store. Without the latter, every reader of the store knows the secret, too.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from unisono import variables
from unisono.comm.meeting import bounded_store
from unisono.comm.meeting.deadline import Deadline
from unisono.errors import RendezvousError

if TYPE_CHECKING:
    from unisono.comm.meeting.identity import Hosts


def make_secret(claims: Sequence[dict[str, Any]]) -> bytes:
    """The secret of the ranks with these claims."""
    return _hash(variables.JOB_SECRET.read() or b"", json.dumps(claims))


def exchange(
    hosts: Hosts,
    store: Any,
    name: str,
    rank: int,
    text: str,
    deadline: Deadline,
    check: Callable[[], None] = lambda: None,
    group: str = "world",
) -> list[str]:
    """The texts of all ranks of these hosts, as in `bounded_store.exchange`.

    Raises RendezvousError, on all ranks, if one of them does not know the secret.
    """

    def seal(member: int, text: str) -> bytes:
        return _hash(hosts.secret, f"{name} {member} {text}").hex().encode()

    mine = f"{seal(rank, text).decode()} {text}"
    ranks = range(len(hosts.pids))
    sealed = bounded_store.exchange(store, name, rank, ranks, mine, deadline, check, group)
    told: list[str] = []
    for member, theirs in enumerate(sealed):
        proof, _, text = theirs.partition(" ")
        if not hmac.compare_digest(proof.encode(), seal(member, text)):
            raise RendezvousError(
                f"group {group}: {hosts.name_rank(rank)} and {hosts.name_rank(member)} have "
                "different secrets. Set UNISONO_JOB_SECRET to the same text on every rank, or on "
                "none; if it already is, a foreign process has written to the store"
            )
        told.append(text)
    return told


def _hash(key: bytes, text: str) -> bytes:
    return hmac.digest(key, text.encode(), hashlib.sha256)
