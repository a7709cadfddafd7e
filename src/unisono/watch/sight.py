"""What this process sees of its job: records, and where the processes are."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterable
from typing import Any

from unisono.comm.engine import native
from unisono.comm.shared_memory.records import GroupRecords, Process
from unisono.processes import state_of
from unisono.watch.calls import last_call_number
from unisono.watch.job_view import EAGER_HOSTS, JobView, look_at_job, open_links, own_host
from unisono.watch.settings import WatchSettings
from unisono.watch.stack_server import StackServer
from unisono.watch.whereabouts import Ask, Whereabouts, whereabouts

LAST = 64
"""How many records of each rank a look takes."""
LOOKS = 4  # in `hang_s`
TICK_S = 0.1
_OVER_HOSTS_S = 5.0
"""How often the first rank looks at groups over hosts."""

watched_groups: weakref.WeakSet[Any] = weakref.WeakSet()
"""The WatchedProcessGroups that attach.py has made, while something else holds them."""


class Sight:
    """`over_hosts` are groups over hosts as this rank has last seen them, if it looks at them;
    `endings` says how processes ended."""

    def __init__(self, settings: WatchSettings) -> None:
        self.stack_server = StackServer()
        self.over_hosts: list[GroupRecords] = []
        self.endings: dict[int, str] = {}
        self._pause_s = min(_OVER_HOSTS_S, settings.hang_s / LOOKS)
        self._again_s = 0.0
        self._where_over_hosts: Ask | None = None

    def retire(self) -> None:
        """Record the ends of calls of watched groups, and how their processes ended."""
        for group in list(watched_groups):
            group.retire()
            self.endings |= group.ledger.endings()

    def where(self, process: Process) -> Whereabouts:
        """Where a process of this host is."""
        return whereabouts(process[1], self.endings)

    def where_now(self, process: Process) -> Whereabouts:
        """The same for frequent questions; of other hosts, what they just said."""
        if process[0] not in ("", own_host()):
            ask = self._where_over_hosts
            return Whereabouts() if ask is None else ask(process)
        return whereabouts(process[1], with_children=False)

    def look(self, last: int) -> JobView:
        """The whole job."""
        return look_at_job(self.where, last)

    def look_over_hosts(self, wants_stacks: bool, hurry_s: float | None = None) -> bool:
        """In a job over few hosts, let the lowest rank, or one that is aborted, see whole groups
        over hosts; returns whether others have not reached its last calls yet. `hurry_s` at the
        end of a group, when that is due at once."""
        self._where_over_hosts = None  # what they last said is old
        links = open_links()
        is_due = hurry_s is not None or time.monotonic() >= self._again_s
        are_few = bool(links) and links[0].hosts.count <= EAGER_HOSTS
        if not (is_due and are_few and (links[0].is_lowest() or native.hold_aborts(None))):
            return False
        self._again_s = time.monotonic() + self._pause_s
        view = look_at_job(
            self.where_now,
            LAST,
            wants_stacks=wants_stacks and hurry_s is None,
            with_children=False,
            hurry_s=0.0 if hurry_s is None else max(TICK_S, hurry_s),
        )
        self.over_hosts = [group for group in view.groups if group.is_part]
        self._where_over_hosts = view.where if wants_stacks else None
        return any(
            last_call_number(member) < max(map(last_call_number, own))
            for group in self.over_hosts
            if (own := [member for member in group.ranks if member.process == view.me])
            for member in group.ranks
            if links[0].may_answer(member.global_rank)
        )

    def is_lowest(self, group: GroupRecords) -> bool:
        """Whether this process is the lowest living rank of a group, or alone sees all of it."""
        if any(group is known for known in self.over_hosts):
            return True
        living = [member for member in group.ranks if not state_of(member.pid).has_ended]
        return bool(living) and living[0].pid == os.getpid()

    def whole(self, groups: Iterable[GroupRecords]) -> list[GroupRecords]:
        """These without parts of groups that span hosts, and those groups as a whole. With many
        hosts each looks at its own part."""
        are_many = any(links.hosts.count > EAGER_HOSTS for links in open_links())
        return [*(each for each in groups if are_many or not each.is_part), *self.over_hosts]
