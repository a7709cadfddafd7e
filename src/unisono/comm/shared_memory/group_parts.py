"""A host's part of a group over several hosts: how its segment is marked, and how parts are joined.

The segment of a part has a place for every rank of the group, and records of those on its host. All
parts of a group have the same key, on all hosts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from unisono.comm.shared_memory.records import GroupRecords

BACKEND_MARK = "\x1f"
"""Separates the name of a group from the name of the library that moves its data."""

_MOST_BYTES = 103
_MOST_OF_HOST = 24


class Part(NamedTuple):
    """The group (`key`) and the host of a part."""

    key: str
    host: str


def name_part(name: str, part: Part, backend: str = "unisono") -> str:
    """The name that a rank of a part publishes, as long as there is room for."""
    host = part.host if len(part.host) <= _MOST_OF_HOST else f"..{part.host[2 - _MOST_OF_HOST :]}"
    about = f"{BACKEND_MARK}{backend}{BACKEND_MARK}{part.key} {host}"
    room = _MOST_BYTES - len(about.encode())
    return name.encode()[:room].decode(errors="ignore") + about


def read_name(text: str) -> tuple[str, str, Part | None]:
    """The group, the backend, and which part of it this is, if it is one."""
    name, backend, about = (*text.split(BACKEND_MARK, 2), "", "")[:3]
    if not about:
        return name, backend or "unisono", None
    key, _, host = about.partition(" ")
    return name, backend, Part(key, host)


def segment_of_key(key: str) -> tuple[int, int]:
    """A name for the memory of all parts together, the same for readers of any of them."""
    return 0, int(key, 16)


def join_parts(groups: Iterable[GroupRecords]) -> list[GroupRecords]:
    """Each group once, with the records of all its parts; in the order of their first parts."""
    found: dict[tuple[int, int], GroupRecords] = {}
    for group in groups:
        before = found.get(group.segment)
        if before is not None and group.is_part:
            ranks = {member.rank: member for member in (*group.ranks, *before.ranks)}
            from dataclasses import replace  # slow to import at every start

            group = replace(before, ranks=tuple(ranks[rank] for rank in sorted(ranks)))
        found[group.segment] = group
    return list(found.values())
