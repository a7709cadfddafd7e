"""Receives from anybody, on this host or another: the first that was posted gets the first message.

Messages from other hosts find their receives by themselves (post_office.py). For those of this host
somebody has to look: a thread, as long as there are such receives.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from unisono.comm.shared_memory.memory_transport import SharedMemory
from unisono.errors import GroupError

if TYPE_CHECKING:
    from unisono.comm.hosts.messages import HostsMessages
    from unisono.comm.hosts.post_office import LinkMessage

_GLANCE_S = 0.0005


class _Receive(NamedTuple):
    work: LinkMessage
    tensor: Any
    tag: int


class AnySource:
    """The receives from anybody of one group, on one rank."""

    def __init__(self, group: HostsMessages) -> None:
        self._group = group
        self._lock = threading.Lock()
        self._receives: list[_Receive] = []
        self._is_looked_after = False

    def add(self, post: Callable[[], LinkMessage], tensor: Any, tag: int) -> LinkMessage:
        """Have one more; `post` lets messages from other hosts find it."""
        with self._lock:
            work = post()
            if work.is_matched() or not isinstance(self._group.local.transport, SharedMemory):
                return work
            self._receives.append(_Receive(work, tensor, tag))
            must_start = not self._is_looked_after
            self._is_looked_after = True
        if must_start:
            name = f"unisono {self._group.name} receives"
            threading.Thread(target=self._look, name=name, daemon=True).start()
        return work

    def _look(self) -> None:
        """Until every receive has its message, or the group has ended."""
        while True:
            with self._lock:
                self._receives = [each for each in self._receives if not each.work.is_matched()]
                if not self._receives or self._group.errored is not None:
                    self._receives.clear()
                    self._is_looked_after = False
                    return
                oldest = {each.tag: each for each in reversed(self._receives)}
            if not any(self._take_local(each) for each in oldest.values()):
                next(iter(oldest.values())).work.await_match(_GLANCE_S)

    def _take_local(self, receive: _Receive) -> bool:
        """Give it a message of this host, if there is one; whether it was."""
        group, work = self._group, receive.work
        local = group.local.transport
        assert isinstance(local, SharedMemory)
        try:
            source = local.probe(receive.tag)
            if source < 0 or not group.office.withdraw(work):
                return False
            with torch.inference_mode():
                group.local.recv(receive.tensor, source, receive.tag)
        except GroupError:
            return False  # whoever waits for it meets that, too
        work.finish = lambda: None
        work.match(group.placement.members[group.placement.here[source]])
        work.complete()
        return True
