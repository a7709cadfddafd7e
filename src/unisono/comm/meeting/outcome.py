"""Whether a new group is made: settled once for all of its ranks, where each of them can look."""

from __future__ import annotations

import time
from collections.abc import Callable

from unisono.comm.meeting.deadline import Deadline
from unisono.comm.meeting.unix_socket import Departed


class Outcome:
    """That of one attempt to make the group `name`, until a deadline. `settle(made)` proposes one,
    or None, and returns what was proposed first, None if nothing was. The rank that leads proposes
    that the group is made, once all are in it; one that gives up before, that it is not. `check`
    raises Departed if that one will not come to it."""

    def __init__(
        self,
        name: str,
        settle: Callable[[bool | None], bool | None],
        deadline: Deadline,
        check: Callable[[], None],
    ) -> None:
        self.name, self.settle, self.deadline = name, settle, deadline
        self._check = check

    def check(self) -> None:
        """Raise Departed if the group will not be made."""
        self._check()
        if self.settle(None) is False:
            raise Departed(f"a process gave up while group {self.name} was made")

    def wait(self) -> bool:
        """Whether it is made, as its leader settles; not, if that takes too long."""
        try:
            while (made := self.settle(None)) is None:
                self._check()
                if not self.deadline.left_s():
                    return bool(self.settle(False))
                time.sleep(0.001)
        except Departed:
            return bool(self.settle(False))
        return made
