"""Works that start in a backward pass: they run together at its end.

Ranks that share a GPU take turns to compute. A call in the middle of a pass would make every rank
wait for the others' turns; at the end no rank computes any more. Overlap with the pass would gain
little anyway: the call itself also runs on the GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from unisono.comm.work import Work


def in_backward() -> bool:
    """Whether this thread is in a backward pass."""
    current: Any = torch._C
    return current._current_graph_task_id() != -1 and current._current_autograd_node() is not None


class WorksOfBackward:
    """The works of a group that wait for the end of a backward pass; true while there are any."""

    def __init__(self) -> None:
        self._waiting: deque[WorkOfBackward] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, begin: Callable[[], Work]) -> Work:
        """A work for what `begin` starts at the end of the pass, or when it is waited for."""
        work = WorkOfBackward(self.begin_all, begin)
        if not self._waiting:
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self.begin_all)
        self._waiting.append(work)
        return work

    def begin_all(self) -> None:
        """Start them, in order. Every other call must do this first, so that the ranks' calls
        meet in program order. Raises the error of the first that could not start; those after it
        fail with the same error."""
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
    """A work that starts later: the first query starts it."""

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
