"""A host's part of a group over several: how its segment says so, and how parts make one group.

The segment of a part has a place for every rank of the group, and records of those on its host. The
same key stands in all parts of a group, on all hosts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unisono.comm.shared_memory.records import GroupRecords

BACKEND_MARK = "\x1f"
"""In the name of a group whose data another library moves: what stands before that library's."""

_MOST_BYTES = 103
_MOST_OF_HOST = 24


@dataclass(frozen=True)
class Part:
    """Of which group (`key`) this is the part of which host."""

    key: str
    host: str


def name_part(name: str, part: Part, backend: str = "unisono") -> str:
    """What a rank of a part says of itself, in as many bytes as there is room for."""
    host = part.host if len(part.host) <= _MOST_OF_HOST else f"..{part.host[2 - _MOST_OF_HOST :]}"
    about = f"{BACKEND_MARK}{backend}{BACKEND_MARK}{part.key} {host}"
    room = _MOST_BYTES - len(about.encode())
    return name.encode()[:room].decode(errors="ignore") + about


def read_name(text: str) -> tuple[str, str, Part | None]:
    """The group, the backend, and what part of it this is, if it is one."""
    name, backend, about = (*text.split(BACKEND_MARK, 2), "", "")[:3]
    if not about:
        return name, backend or "unisono", None
    key, _, host = about.partition(" ")
    return name, backend, Part(key, host)


def segment_of_key(key: str) -> tuple[int, int]:
    """What names the memory of all parts together, the same to all who read any of them."""
    return 0, int(key, 16)


def join_parts(groups: Iterable[GroupRecords]) -> list[GroupRecords]:
    """Groups, each once, with what all parts of it have told; in the order of their first."""
    found: dict[tuple[int, int], GroupRecords] = {}
    for group in groups:
        before = found.get(group.segment)
        if before is not None and group.is_part:
            ranks = {member.rank: member for member in (*group.ranks, *before.ranks)}
            group = replace(before, ranks=tuple(ranks[rank] for rank in sorted(ranks)))
        found[group.segment] = group
    return list(found.values())
