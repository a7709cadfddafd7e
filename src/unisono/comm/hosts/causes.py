"""Why a group over hosts has ended, as its members tell each other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from unisono.errors import (
    CollectiveTimeout,
    DeadlockError,
    GroupAborted,
    GroupError,
    MessageMismatch,
    PeerLost,
)

_KINDS: dict[str, type[GroupError]] = {
    kind.__name__: kind
    for kind in (CollectiveTimeout, DeadlockError, GroupAborted, MessageMismatch, PeerLost)
}
_NOTE_BYTES = 240
"""What the shared memory of a host has room for."""


@dataclass(frozen=True)
class Cause:
    """`kind` is the exception's name, `text` what all members say of it; where `missing` ranks did
    not come to a call, which each member says by itself, where these are; so, too, where the data
    of two ranks that are `apart` did not arrive. Ranks are the group's."""

    kind: str
    text: str
    peer: int = -1
    reason: str = ""
    call: int = 0
    missing: tuple[int, ...] = ()
    cycle: tuple[int, ...] = ()
    apart: tuple[int, ...] = ()

    def encode(self, most_bytes: int = 1 << 16) -> str:
        """As JSON of so many bytes at most; a long text is cut short."""
        usual = asdict(Cause("", ""))  # not what is empty: a peer of 0 is rank 0
        fields = {name: value for name, value in asdict(self).items() if value != usual[name]}
        while len((text := json.dumps(fields, ensure_ascii=False)).encode()) > most_bytes:
            longest = max(("text", "reason"), key=lambda name: len(fields.get(name, "")))
            over = len(text.encode()) - most_bytes
            if len(fields.get(longest, "")) < over + 8:
                return json.dumps({"kind": self.kind, "text": self.text[:40], "peer": self.peer})
            fields[longest] = fields[longest][: -over - 4] + "..."
        return text

    def note(self) -> str:
        """As a note for the ranks of the same host."""
        return self.encode(_NOTE_BYTES)

    def error(self, rank: int, group: str, doing: str, title: str = "") -> GroupError:
        """What a member raises; `doing` is what it was about, `title` what it says first."""
        kind = _KINDS.get(self.kind, GroupError)
        text = "\n".join(filter(None, (title, self.text)))
        first, *details = text.split("\n")
        if kind is PeerLost and doing:
            first += f"; this rank was in {doing} of group {group}"
        error = kind("\n".join([first, *details]), rank=rank, group=group, call=self.call)
        if isinstance(error, (PeerLost, GroupAborted)):
            error.peer = self.peer
        if isinstance(error, GroupAborted):
            error.reason = self.reason
        if isinstance(error, CollectiveTimeout):
            error.missing = self.missing
        if isinstance(error, DeadlockError):
            error.cycle = self.cycle
        return error


def late_cause(missing: Sequence[int], where: str, call: int) -> Cause:
    """These ranks have not come to a call by its deadline."""
    return Cause("CollectiveTimeout", where, call=call, missing=tuple(missing))


def decode_cause(text: str) -> Cause | None:
    """The reverse of `encode`; None for what is no cause."""
    try:
        fields = json.loads(text)
        lists = {name: tuple(fields.get(name, ())) for name in ("missing", "cycle", "apart")}
        fields = {"text": ""} | fields | lists
        return Cause(**fields)
    except (ValueError, TypeError, AttributeError):
        return None
