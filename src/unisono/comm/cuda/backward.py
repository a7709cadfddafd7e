"""Works that begin in a backward pass: they are carried out at its end, together.

On a GPU that ranks share they take turns to compute. A call in the midst of a pass has every rank
wait until the others have had theirs; at the end nobody computes any more. What could be hidden
behind the pass, on a GPU of one's own, would be little: the call is the GPU's work, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from unisono.comm.work import Work


def in_backward() -> bool:
    """Whether this thread is in the midst of a backward pass."""
    current: Any = torch._C
    return current._current_graph_task_id() != -1 and current._current_autograd_node() is not None


class WorksOfBackward:
    """The works of a group that wait for the end of a backward pass; true while there are any."""

    def __init__(self) -> None:
        self._waiting: deque[WorkOfBackward] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, begin: Callable[[], Work]) -> Work:
        """The work of what `begin` begins, at the end of the pass or when somebody waits for it."""
        work = WorkOfBackward(self.begin_all, begin)
        if not self._waiting:
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self.begin_all)
        self._waiting.append(work)
        return work

    def begin_all(self) -> None:
        """Begin them, in their order. Whoever calls anything else must do this first, so that the
        ranks' calls meet in the order of the program. Raises what went wrong with the first that
        could not begin; those behind it have failed by the same."""
        while self._waiting:
            work = self._waiting.popleft()
            try:
                work.begun = work.begin()
            except BaseException as error:
                work.error = error
                while self._waiting:
                    self._waiting.popleft().error = error
                raise


class WorkOfBackward(Work):
    """What is begun later: whoever asks after it begins it."""

    __slots__ = ("_begin_all", "begin", "begun", "error")

    def __init__(self, begin_all: Callable[[], None], begin: Callable[[], Work]) -> None:
        self._begin_all = begin_all
        self.begin = begin
        self.begun: Work | None = None
        self.error: BaseException | None = None

    def _work(self) -> Work:
        if self.begun is None and self.error is None:
            self._begin_all()
        if self.error is not None:
            raise self.error
        assert self.begun is not None
        return self.begun

    def wait(self, timeout_s: float | None = None) -> None:
        self._work().wait(timeout_s)

    def is_completed(self) -> bool:
        return self.error is not None or self._work().is_completed()

    def exception(self) -> Exception | None:
        return self.error if isinstance(self.error, Exception) else None
