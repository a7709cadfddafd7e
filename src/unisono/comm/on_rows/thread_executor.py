"""Threads that run the calls of a group, one after the other, and their works."""

from __future__ import annotations

import contextlib
import copy
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from unisono.comm.work import Work
from unisono.errors import CollectiveTimeout

Job = Callable[[], Any]
INTERRUPTED = "it was interrupted by Ctrl-C, or by a signal handler that raised"


class ThreadWork(Work):
    """A job that a thread runs. It holds the job, and so its tensors, until that is done."""

    __slots__ = ("_doing", "_done", "_error", "_job", "_result")

    def __init__(self, job: Job, doing: str) -> None:
        self._job: Job | None = job
        self._doing = doing
        self._done = threading.Event()
        self._error: Exception | None = None
        self._result: Any = None

    def carry_out(self) -> None:
        assert self._job is not None
        try:
            with torch.inference_mode():  # allows writes to tensors of both kinds
                self._result = self._job()
        except Exception as error:
            self._error = error
        self._job = None
        self._done.set()

    def wait(self, timeout_s: float | None = None) -> None:
        if not self._done.wait(timeout_s):
            raise CollectiveTimeout(f"{self._doing} is still in progress")
        if self._error is not None:
            raise copy.copy(self._error) from self._error.__cause__

    def is_completed(self) -> bool:
        return self._done.is_set()

    def exception(self) -> Exception | None:
        return self._error

    def source_rank(self) -> int:
        self.wait()
        return super().source_rank() if self._result is None else int(self._result)


class ThreadExecutor:
    """The thread of one group; it starts with the first job, and ends with this object."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._works: queue.SimpleQueue[ThreadWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._latest: ThreadWork | None = None
        self._end = weakref.finalize(self, self._works.put, None)

    def begin(self, job: Job, doing: str) -> ThreadWork:
        """Run a job after all that were begun before."""
        work = ThreadWork(job, doing)
        if self._thread is None:
            self._thread = threading.Thread(
                target=_serve, args=(self._works,), name=f"unisono {self._name}", daemon=True
            )
            self._thread.start()
        self._works.put(work)
        self._latest = work
        return work

    def is_idle(self) -> bool:
        return self._latest is None or self._latest.is_completed()

    def finish(self) -> None:
        """Return once every job has finished or failed."""
        if self._latest is not None:
            with contextlib.suppress(Exception):
                self._latest.wait()

    def settle(self) -> bool:
        """Return once every job is over; False if one has waited for its peers for 1 s."""
        left, end_s = -1, 0.0
        while not self.is_idle():
            if self._works.qsize() != left:
                left, end_s = self._works.qsize(), time.monotonic() + 1.0
            elif time.monotonic() > end_s:
                return False
            time.sleep(0.002)
        return True

    def close(self) -> None:
        """Finish all jobs, then end."""
        self._end()

    @staticmethod
    def run_beside(job: Job, doing: str) -> ThreadWork:
        """Run a job concurrently, in a separate thread."""
        work = ThreadWork(job, doing)
        threading.Thread(target=work.carry_out, name=f"unisono {doing}", daemon=True).start()
        return work


def _serve(works: queue.SimpleQueue[ThreadWork | None]) -> None:
    while (work := works.get()) is not None:
        work.carry_out()
        work = None
