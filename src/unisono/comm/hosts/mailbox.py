"""What has arrived for one group from other hosts, and those who wait for it."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable

import torch

from unisono.comm.hosts.link import Frame

SLICE_S = 0.05
"""How often whoever waits looks whether it should wait any longer."""


class Mailbox:
    """Frames by sender and tag, each in the order of arrival."""

    def __init__(self) -> None:
        self._frames: dict[tuple[int, int], collections.deque[Frame]] = {}
        self.changed = threading.Condition()

    def put(self, peer: int, frame: Frame) -> None:
        """Called by the link's thread."""
        with self.changed:
            self._frames.setdefault((peer, frame.tag), collections.deque()).append(frame)
            self.changed.notify_all()

    def wake(self) -> None:
        """Have everybody look whether to wait any longer."""
        with self.changed:
            self.changed.notify_all()

    def clear(self) -> None:
        """Forget everything."""
        with self.changed:
            self._frames.clear()

    def take(
        self,
        peer: int,
        tag: int,
        end: float,
        check: Callable[[int], None],
        late: Callable[[], None],
    ) -> Frame:
        """The next frame of a sender with a tag. While it is not there, `check` is called with the
        sender, and raises when it will not come; `late` raises after `end`."""
        key = peer, tag
        with self.changed:
            while True:
                frames = self._frames.get(key)
                if frames:
                    frame = frames.popleft()
                    if not frames:
                        del self._frames[key]
                    return frame
                check(peer)
                left_s = end - time.monotonic()
                if left_s <= 0:
                    break
                self.changed.wait(min(left_s, SLICE_S))
        late()
        raise AssertionError("unreachable")


def fill(row: torch.Tensor, next_frame: Callable[[], Frame]) -> None:
    """Fill a row of bytes from the frames that bring it."""
    begin = 0
    while begin < row.numel():
        frame = next_frame()
        end = begin + frame.payload.numel()
        row[begin:end].copy_(frame.payload)
        frame.release()
        begin = end
