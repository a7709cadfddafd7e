"""Works that return a result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unisono.comm.base import Work
from unisono.comm.work import FinishedWork


class ResultWork(Work[Any]):
    """An operation under way. `wait()` returns what the blocking form would have returned."""

    __slots__ = ("_finish", "_result", "_work")

    def __init__(
        self, work: Work | None, result: Any = None, finish: Callable[[], Any] | None = None
    ) -> None:
        self._work = FinishedWork() if work is None else work
        self._result = result
        self._finish = finish

    def wait(self, timeout_s: float | None = None) -> Any:
        self._work.wait(timeout_s)
        finish = self._finish
        if finish is not None:
            self._result = finish()
            self._finish = None
        return self._result

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def exception(self) -> Exception | None:
        return self._work.exception()

    def source_rank(self) -> int:
        return self._work.source_rank()


def result_or_work(
    work: Work | None, async_op: bool, result: Any, finish: Callable[[], Any] | None = None
) -> Any:
    """The result of a call or, with `async_op`, a work whose `wait()` returns it. `finish` makes
    the result from what has arrived."""
    if async_op:
        return ResultWork(work, result, finish)
    return result if finish is None else finish()
