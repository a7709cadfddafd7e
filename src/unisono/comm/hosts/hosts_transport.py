"""The transport of ranks on several hosts. The engine runs every call as a whole.

Every host has shared memory with a place for each rank of the group. The engine sends what a rank
writes there to the other hosts by UCX, so that a call, a message or a failure over hosts looks as
it does on one. The control lines tell the engine what it cannot see: the ends of processes on other
hosts.
"""

from __future__ import annotations

import _thread
import contextlib
from collections.abc import Callable, Sequence
from sys import is_finalizing
from typing import Any, NamedTuple

from unisono.comm.hosts.links import GroupMembers, Links
from unisono.comm.hosts.placement import Placement, place
from unisono.comm.meeting.deadline import Deadline, in_seconds
from unisono.comm.meeting.makings import SHRINKS, look
from unisono.comm.meeting.membership import Member, Membership
from unisono.comm.meeting.unix_socket import Departed, RendezvousServer
from unisono.comm.shared_memory.engine_transport import EngineTransport, told_of_deaths
from unisono.comm.shared_memory.group_parts import Part, name_part
from unisono.comm.shared_memory.memory_transport import split_here
from unisono.comm.transport import Transport
from unisono.errors import RendezvousError, name_ranks

_ANSWER_S = 0.4
"""How long a missing rank may take to say where it is."""
_GLANCE_S = 0.1


class Meeting(NamedTuple):
    """What a new group will be, and its deadline; `check` raises if ranks will not join."""

    name: str
    global_ranks: tuple[int, ...] | None
    timeout_s: float
    deadline: Deadline
    check: Callable[[], None]


def segments_of(placement: Placement) -> list[tuple[Sequence[int], int, int]]:
    """The segments of a host: one for all ranks of the group, and one for those of this host."""
    here = placement.here
    sharers = placement.sharers
    return [(here, len(placement.members), sharers), (range(len(here)), len(here), sharers)]


class HostsMembership(Membership):
    """A membership that includes the ranks of other hosts; `met` has those of this one."""

    def __init__(self, met: Membership, links: Links, placement: Placement) -> None:
        hosts = links.hosts
        here = dict(zip(placement.here, met.members, strict=True))
        members = tuple(
            Member(
                here[rank].address if rank in here else "",
                hosts.pids[member],
                hosts.names[hosts.host_of(member)],
            )
            for rank, member in enumerate(placement.members)
        )
        super().__init__(met.key, placement.rank, len(members), met.group, members, inner=met.inner)
        self.links, self.placement = links, placement

    def find_stopped(self) -> list[int]:
        members = self.placement.members
        away = [member for rank, member in enumerate(members) if not self.members[rank].is_here]
        stopped = self.links.find_stopped(away, _ANSWER_S)
        return sorted([*super().find_stopped(), *map(members.index, stopped)])

    def ask_elsewhere(self, ranks: Sequence[int]) -> dict[int, str]:
        self.links.stay()
        members = self.placement.members
        told = self.links.find_ranks([members[rank] for rank in ranks], _ANSWER_S)
        return {members.index(member): text for member, text in told.items()}

    def partner_elsewhere(self, rank: int) -> int | None:
        place = self.placement
        rank = place.rank if rank < 0 else rank
        other = place.host if rank not in place.here else next(place.others())
        return place.mate(rank, other)

    def unheard(self, stopped: Sequence[int]) -> list[int]:
        place = self.placement
        away = [rank for rank, member in enumerate(self.members) if not member.is_here]
        return [rank for rank in away if place.mate(rank, place.host) in stopped]


class HostsTransport(EngineTransport):
    """A rank of a group of several hosts. Made by `connect` and `split`, not by hand."""

    def __init__(
        self,
        membership: HostsMembership,
        server: RendezvousServer,
        name: str,
        global_ranks: tuple[int, ...] | None,
        timeout_s: float,
    ) -> None:
        self.placement = membership.placement
        self.links = membership.links.share()
        self.key = self.links.next_key(name)
        hosts = self.links.hosts
        shown = name_part(name, Part(f"{self.key:x}", hosts.names[hosts.mine]))
        super().__init__(membership, server, name, global_ranks, timeout_s, shown)

    @classmethod
    def over(
        cls,
        met: Membership,
        links: Links,
        placement: Placement,
        server: RendezvousServer,
        meeting: Meeting,
    ) -> HostsTransport:
        """The group whose members on this host have `met`, once all others have joined, too.

        Raises RendezvousError if they have not by the deadline; and what the meeting's `check`
        raises."""
        name, global_ranks, timeout_s = meeting.name, meeting.global_ranks, meeting.timeout_s
        with contextlib.ExitStack() as stack:
            stack.callback(met.close)
            membership = HostsMembership(met, links, placement)
            made = cls(membership, server, name, global_ranks, timeout_s)
            stack.pop_all()
            stack.callback(made.close)
            made._reach_others(meeting.deadline, meeting.check)
            stack.pop_all()
        return made

    def _reach_others(self, deadline: Deadline, check: Callable[[], None]) -> None:
        inner = self.membership.inner
        assert inner is not None
        try:
            self.links.connect(self.placement.neighbours(), deadline.left_s(), check)
            self.group.span(
                inner,
                self.placement.hosts_of_ranks(),
                self.key,
                self.links.workers(self.placement.members),
            )
        except BaseException as error:
            inner.close()
            if not isinstance(error, OSError):
                raise
            raise RendezvousError(f"group {self.name}: UCX cannot connect: {error}") from error
        self.links.add(self)
        while missing := self.group.meet(min(_GLANCE_S, deadline.left_s()), False):
            check()
            look()
            ending = self.ending("no call")
            if ending is not None:
                raise Departed(f"a member of group {self.name} left while it was made ({ending})")
            if not deadline.left_s() and (missing := self.group.meet(_ANSWER_S, True)):
                away = [rank for rank in missing if not self.membership.members[rank].is_here]
                rank = (away or missing)[0]
                limit = in_seconds(deadline.timeout_s)
                why = f"{name_ranks(missing)} did not join group {self.name} by UCX within {limit}"
                raise self.links.no_connection(self.placement.members[rank], why)

    def split(self, members: tuple[int, ...], name: str) -> Transport:
        server, links, before, known = self.server(), self.links, self.placement, self.global_ranks
        placement = place([before.members[rank] for rank in members], links.hosts, links.me)
        if len(placement.hosts) == 1:
            return split_here(self, members, name)
        if (ending := self.ending("no call")) and getattr(ending, "reason", "") != SHRINKS:
            raise ending  # that it shrinks is told below
        check = self.check_of_split(members)
        here = [members[rank] for rank in placement.here]
        global_ranks = None if known is None else tuple(known[rank] for rank in members)
        timeout_s = self.timeout_s
        meeting = Meeting(name, global_ranks, timeout_s, Deadline(timeout_s), check)
        with told_of_deaths(check):
            met = self.meet(here, name, check, segments_of(placement))
            return HostsTransport.over(met, links, placement, server, meeting)

    def shrink(self, name: str, at_least: int, timeout_s: float, store: Any) -> Transport:
        from unisono.comm.hosts.going_on import shrink  # rarely needed

        return shrink(self, name, at_least, timeout_s, store)

    def open_store(self) -> Any:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        hosted = self.links.open_hosted(self.placement.members[0])
        return PrefixStore(f"unisono/torch/{self.key:x}", hosted)

    def find_stopped(self) -> list[int]:
        """The ranks whose processes are stopped, according to their hosts."""
        return self.membership.find_stopped()

    def decide(self, serial: int, value: int) -> int:
        return self.links.decide(self.key, serial, value, self.timeout_s)

    def __del__(self, is_finalizing: Callable[[], bool] = is_finalizing) -> None:
        super().__del__(is_finalizing)
        if getattr(self, "_server", None) is not None and not is_finalizing():
            # The collector may run in a thread that has the links' lock, or threading's own.
            _thread.start_new_thread(self.links.close, (self.key,))

    def close(self) -> None:
        if self.is_closed:
            return
        try:
            super().close()
        finally:
            self.links.close(self.key)

    # -- callbacks of the links, in their thread --------------------------------------------------

    def describe(self) -> GroupMembers:
        """For the watch."""
        return GroupMembers(self.name, f"{self.key:x}", self.placement.members)

    def on_lost(self, peer: int, is_silent: bool) -> None:
        """The process of a global rank has ended, or no longer answers."""
        if peer in self.placement.members:
            self.group.lose(self.placement.members.index(peer), is_silent)

    def on_left(self, peer: int) -> None:
        """The process of a global rank has left all groups cleanly."""
        if peer in self.placement.members:
            self.group.leave(self.placement.members.index(peer))

    def end(self) -> None:
        """This process ends: tell the others, after all that this rank has sent them."""
        self.group.close()
