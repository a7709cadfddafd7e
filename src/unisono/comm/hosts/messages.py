"""Point to point over hosts: by shared memory to a rank of the same host, else by a link.

A message to another host is announced in a frame, which carries its bytes where they are few. The
receiver matches announcements and receives, first come first served by source and tag, and says
so; then a send is over, or a large message's rest may come, straight to where it belongs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from sys import _getframe as _caller
from typing import Any

from unisono.comm.engine import native
from unisono.comm.hosts.any_source import AnySource
from unisono.comm.hosts.deadlocks import DeadlockSearch
from unisono.comm.hosts.group import HostsGroup
from unisono.comm.hosts.link import FRAME_BYTES, Frame, Kind
from unisono.comm.hosts.post_office import (
    MOST_ABOUT_BYTES,
    Arrival,
    LinkMessage,
    PostOffice,
    decode_message,
    encode_message,
)
from unisono.comm.on_rows.rows import bytes_of, row_of, write_back
from unisono.comm.on_rows.thread_executor import INTERRUPTED, ThreadExecutor
from unisono.comm.shared_memory.error_texts import describe_side
from unisono.comm.tensors import dtype_name
from unisono.comm.work import Work
from unisono.errors import GroupError

_IN_LINE_BYTES = FRAME_BYTES - MOST_ABOUT_BYTES


class HostsMessages(HostsGroup):
    """A member that can send and receive messages."""

    def __init__(self, *args: Any) -> None:
        self.office = PostOffice(self)
        self.deadlocks = DeadlockSearch(self)
        self._any_source = AnySource(self)
        self._serials = itertools.count(1)
        self._mover: ThreadExecutor | None = None
        super().__init__(*args)

    def send(self, tensor: Any, peer: int, tag: int) -> None:
        local = self._place_here(peer)
        if local is not None:
            self._locally(lambda: self.local.send(tensor, local, tag))
            return
        self._wait(self._send_away(tensor, peer, tag))

    def recv(self, tensor: Any, peer: int | None, tag: int) -> int:
        local = self._place_here(peer)
        if local is not None:
            return self._recv_locally(tensor, local, tag)
        work = self._receive_away(tensor, peer, tag)
        self._wait(work)
        return work.source_rank()

    def isend(self, tensor: Any, peer: int, tag: int) -> Work:
        local = self._place_here(peer)
        if local is not None:
            return LocalMessage(self, self._locally(lambda: self.local.isend(tensor, local, tag)))
        return self._send_away(tensor, peer, tag)

    def irecv(self, tensor: Any, peer: int | None, tag: int) -> Work:
        local = self._place_here(peer)
        if local is not None:
            return LocalMessage(self, self._locally(lambda: self.local.irecv(tensor, local, tag)))
        return self._receive_away(tensor, peer, tag)

    def close(self) -> None:
        super().close()
        if self._mover is not None:
            self._mover.close()

    # -- inside this host ------------------------------------------------------------------------

    def _place_here(self, peer: int | None) -> int | None:
        """The peer's number on this host; None where it is on another, or may be anybody."""
        here = self.placement.here
        return here.index(peer) if peer in here else None

    def _recv_locally(self, tensor: Any, source: int, tag: int) -> int:
        found: int = self._locally(lambda: self.local.recv(tensor, source, tag))
        return self.placement.here[found]

    def _locally(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except GroupError as error:
            raise self.with_report(self._translate(error.with_traceback(None))) from None

    # -- to and from other hosts -----------------------------------------------------------------

    def _send_away(self, tensor: Any, dst: int, tag: int) -> LinkMessage:
        peer = self.placement.members[dst]
        self.links.connect([peer], self.timeout_s, summons=True)
        row = bytes_of(row_of(tensor))
        side = _describe(tensor)
        serial = next(self._serials)
        in_line = row.numel() <= _IN_LINE_BYTES
        work = LinkMessage(self, f"send to {self.name_rank(dst)} (tag {tag})", peer, tensor)
        work.rest = None if in_line else row
        work.record = self.records.begin_message(True, dst, tag, tensor)
        self.office.expect_reply(peer, serial, work)
        payload = encode_message(row.numel(), dtype_name(tensor), side, row if in_line else row[:0])
        self.deadlocks.count_sent(peer)
        self.link(peer).send(Kind.MESSAGE, self.key, tag, serial, payload, self.check)
        return work

    def _receive_away(self, tensor: Any, src: int | None, tag: int) -> LinkMessage:
        peer = None if src is None else self.placement.members[src]
        who = "anybody" if src is None else self.name_rank(src)
        row = row_of(tensor)
        work = LinkMessage(self, f"recv from {who} (tag {tag})", peer, tensor)
        work.target = bytes_of(row)
        work.record = self.records.begin_message(False, src, tag, tensor)
        work.dtype, work.side = dtype_name(tensor), _describe(tensor)
        work.finish = lambda: write_back(tensor, row)

        def post() -> LinkMessage:
            self.office.want(work, tag)
            return work

        return post() if src is not None else self._any_source.add(post, tensor, tag)

    def _wait(self, work: Work) -> None:
        try:
            work.wait()
        except BaseException:
            self.abort(INTERRUPTED)
            raise

    # -- what the links bring, in their threads --------------------------------------------------

    def on_frame(self, peer: int, frame: Frame) -> None:
        if frame.kind == Kind.MESSAGE:
            self.office.arrive(Arrival(peer, frame.tag, frame.extra, *decode_message(frame)))
            self.deadlocks.count_received(peer)
        elif frame.kind == Kind.MATCHED:
            work = self.office.replied(peer, frame.tag)
            if work is not None and work.rest is not None:
                self._move_rest(work, peer, frame.tag)
            elif work is not None:
                work.complete()
            self.deadlocks.count_received(peer)
        elif frame.kind == Kind.REST:
            self.office.take_rest(peer, frame)
        else:
            super().on_frame(peer, frame)

    def on_probe(self, probe: dict[str, Any]) -> None:
        self.deadlocks.on_probe(probe)

    def _move_rest(self, work: LinkMessage, peer: int, serial: int) -> None:
        """In a thread of the group's own: a link's thread must not wait for room."""

        def move() -> None:
            assert work.rest is not None
            self.link(peer).send_row(self.key, serial, work.rest, self.check, Kind.REST)
            work.complete()

        with self._lock:
            if self._mover is None:
                self._mover = ThreadExecutor(f"{self.name} messages")
        self._mover.begin(move, work.doing)


def _describe(tensor: Any) -> str:
    site = native.site_of(_caller(1))
    return describe_side(dtype_name(tensor), int(tensor.nbytes), tuple(tensor.shape), site)


class LocalMessage(Work):
    """A message inside this host; what goes wrong is told in ranks of the whole group."""

    def __init__(self, group: HostsMessages, work: Work) -> None:
        self._group = group
        self._work = work

    def wait(self, timeout_s: float | None = None) -> None:
        self._group._translated(lambda: self._work.wait(timeout_s), self._work)

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def exception(self) -> Exception | None:
        error = self._work.exception()
        return self._group._translate(error) if isinstance(error, GroupError) else error

    def source_rank(self) -> int:
        return self._group.placement.here[self._work.source_rank()]
