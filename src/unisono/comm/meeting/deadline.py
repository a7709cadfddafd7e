"""How long ranks wait for each other, and what they log meanwhile."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from unisono.comm.meeting import makings
from unisono.errors import RendezvousError, name_ranks

JOIN_TIMEOUT_S = 300.0
"""How long ranks wait for each other at the start, by default."""

LATECOMERS_S = 2.0
"""How long members of a group that ended without a death wait for each other to make a new one:
a rank that caught the error may still join."""

QUIET_S = 5.0
"""A rank that has waited for this long logs which ranks are missing."""

_FOR_EVER_S = 1e8  # the timeouts of sockets and stores cannot be much longer
_LONGEST_PAUSE_S = 0.05

_log = logging.getLogger("unisono")


def meeting_timeout_s(timeout_s: float | None, join_timeout_s: float | None = None) -> float:
    """How long a meeting may take: its own timeout, else the general one, else the default."""
    if join_timeout_s is not None:
        return join_timeout_s
    return JOIN_TIMEOUT_S if timeout_s is None else timeout_s


def in_seconds(limit_s: float) -> str:
    """ "300 s", "0.2 s": a limit in a message."""
    return f"{round(limit_s, 1) if limit_s >= 0.1 else limit_s:g} s"


class Deadline:
    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end = time.monotonic() + min(timeout_s, _FOR_EVER_S)

    def left_s(self) -> float:
        return max(0.0, self._end - time.monotonic())


class LimitOfEach(Deadline):
    """A limit for each of several requests, instead of for all of them together."""

    def left_s(self) -> float:
        return self.timeout_s


class Waiting:
    """A rank's wait for the others of a new group, up to a deadline. `sleep` may end a pause early,
    and returns whether it did."""

    def __init__(
        self,
        rank: int,
        size: int,
        group: str,
        deadline: Deadline,
        pause_s: float = 0.0001,
        sleep: Callable[[float], bool | None] = time.sleep,
    ) -> None:
        self._rank, self._size, self._group = rank, size, group
        self._deadline = deadline
        self._quiet = Deadline(QUIET_S)
        self._has_spoken = False
        self._pause_s = self._first_pause_s = pause_s
        self._sleep = sleep

    def is_long(self) -> bool:
        return not self._quiet.left_s()

    def say(self, missing: Sequence[int], here: int | None = None, where: str = "") -> None:
        """Log once which ranks are missing, how many have joined (`here`), and other details."""
        if self._has_spoken:
            return
        self._has_spoken = True
        present = "" if here is None else f": {here} of {self._size} have joined"
        _log.warning(
            "unisono: rank %d is waiting for %s%s%s (group %s; it gives up in %.0f s)",
            self._rank,
            name_ranks(missing),
            present,
            where,
            self._group,
            self._deadline.left_s(),
        )

    def look(self, find_missing: Callable[[], Sequence[int]]) -> None:
        """Log the missing ranks, if the wait is long; raise RendezvousError at the deadline."""
        is_late = not self._deadline.left_s()
        if not is_late and (self._has_spoken or not self.is_long()):
            return
        missing = find_missing()
        if is_late and missing:
            raise RendezvousError(
                f"group {self._group}: {name_ranks(missing)} of {self._size} did not join within "
                f"{in_seconds(self._deadline.timeout_s)}"
            )
        if missing:
            self.say(missing, self._size - len(missing))

    def hurry(self) -> None:
        """The others are there: check as often as at first."""
        self._pause_s = self._first_pause_s

    def pause(self) -> None:
        """Sleep before the next check, a little longer each time in which nothing happens."""
        makings.look()
        if self._sleep(self._pause_s):
            self.hurry()
        else:
            self._pause_s = min(self._pause_s * 1.5, _LONGEST_PAUSE_S)
