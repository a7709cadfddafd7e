"""From the end of a host's own group to the end of the group over hosts."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from unisono.comm.engine import Status
from unisono.comm.hosts.causes import Cause, decode_cause, late_cause
from unisono.comm.shared_memory import error_texts
from unisono.comm.shared_memory.memory_transport import SharedMemory
from unisono.errors import CollectiveTimeout, GroupAborted, GroupError, PeerLost, name_ranks

if TYPE_CHECKING:
    from unisono.comm.hosts.group import HostsGroup


def cause_of(error: GroupError, group: HostsGroup) -> Cause:
    """Why a group over hosts ends, by the exception of the members on this host."""
    here = group.placement.here
    if isinstance(error, GroupAborted):
        told = decode_cause(error.reason)
        if told is not None:
            return told
        by = here[error.peer] if 0 <= error.peer < len(here) else -1
        text = f"rank {by} ended group {group.name}" + (f": {error.reason}" if error.reason else "")
        return Cause("GroupAborted", text, peer=by, reason=error.reason, call=group.calls)
    if isinstance(error, PeerLost) and 0 <= error.peer < len(here):
        rank = here[error.peer]
        return Cause("PeerLost", f"{group.name_rank(rank)} {_how(group)}", rank, call=group.calls)
    if isinstance(error, CollectiveTimeout):
        return _timeout(error, group)
    text = str(error)
    return Cause(type(error).__name__, text, call=group.calls)


def _how(group: HostsGroup) -> str:
    """How the process of a rank of this host ended."""
    local = group.local.transport
    if isinstance(local, SharedMemory):
        status, _, _, detail = local.group.failure()
        if status == Status.PEER_LOST:
            return error_texts.describe_ending(detail)
    return f"has left group {group.name}"


def _timeout(error: CollectiveTimeout, group: HostsGroup) -> Cause:
    here = group.placement.here
    late = [here[rank] for rank in (*error.missing, *error.stalled) if rank < len(here)]
    where = re.findall(r"(?:is at|did not answer|is stopped).*", str(error))
    if not group.doing and late:  # a message inside this host
        text = f"a message between {group.name_rank(group.rank)} and {group.name_rank(late[0])}"
        text += f" was not matched by its deadline of {group.timeout_s:g} s"
        return Cause("CollectiveTimeout", "\n".join([text, *str(error).splitlines()[1:]]))
    lines = [f"  {name_ranks([rank])} {line}" for rank, line in zip(late, where, strict=False)]
    return late_cause(late, "\n".join(lines), group.calls)
