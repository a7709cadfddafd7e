"""Calls of a group over torch that a device runs: nccl's return once they are queued on the
device, so the caller's own thread makes them, on a stream next to its own. gloo's and mpi's
block in C++, where Ctrl-C has no effect: a thread of the group runs them."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from unisono.comm.on_rows.thread_executor import Job
from unisono.comm.work import Work
from unisono.errors import CollectiveTimeout

_cuda: Any = torch.cuda  # torch has no types for it


class StreamWork(Work):
    """A job on a device; `end` is the event in its queue after it."""

    __slots__ = ("_doing", "_end", "_kept")

    def __init__(self, end: Any, kept: Any, doing: str) -> None:
        self._end = end
        self._kept = kept
        self._doing = doing

    def wait(self, timeout_s: float | None = None) -> None:
        """Make the caller's stream wait for it; with a timeout, the caller waits as well."""
        if timeout_s is not None:
            deadline = time.monotonic() + timeout_s
            while not self._end.query():
                if time.monotonic() > deadline:
                    raise CollectiveTimeout(f"{self._doing} is still in progress")
                time.sleep(0.0002)
        self._end.wait()
        self._kept = None

    def is_completed(self) -> bool:
        return bool(self._end.query())

    def exception(self) -> Exception | None:
        return None


class StreamExecutor:
    """The stream of one group on each device, next to the caller's."""

    def __init__(self) -> None:
        self._of: dict[torch.device, Any] = {}

    def begin(
        self, job: Job, doing: str, device: torch.device, kept: Any, after: Any = None
    ) -> StreamWork:
        """Queue a job after the work on the caller's stream so far, or after `after`."""
        beside = self._of.get(device)
        if beside is None:
            beside = self._of[device] = _cuda.Stream(device)
        if after is None:
            beside.wait_stream(torch.cuda.current_stream(device))
        else:
            beside.wait_event(after)
        with torch.cuda.stream(beside), torch.inference_mode():
            job()
            for tensor in kept:
                tensor.record_stream(beside)  # dropping the work may drop the tensors, too
            end = _cuda.Event()
            end.record(beside)
        return StreamWork(end, kept, doing)


def in_order_of_streams(job: Job, device: torch.device) -> Job:
    """For a backend that blocks, and a device's tensors: begin after the work on the caller's
    stream so far, and end when the device has finished."""
    if device.type != "cuda":
        return job
    so_far = torch.cuda.current_stream(device).record_event()

    def in_order() -> Any:
        with torch.cuda.device(device):
            so_far.wait()
            result = job()
            torch.cuda.current_stream(device).synchronize()
        return result

    return in_order


class StreamMessage(Work):
    def __init__(self, work: Any, end: Callable[[Any], int | None], doing: str) -> None:
        self._work = work
        self._end = end
        self._doing = doing
        self._source: int | None = None
        self._is_over = False

    def belongs_to(self, whole: Any) -> None:
        """It was begun together with others, and ends with them."""
        self._work = whole

    def wait(self, timeout_s: float | None = None) -> None:
        if self._is_over:
            return
        if timeout_s is None:
            self._work.wait()
        elif not self._work.wait(timedelta(seconds=timeout_s)):
            raise CollectiveTimeout(f"{self._doing} is still in progress")
        self._source = self._end(self._work)
        self._is_over = True

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def exception(self) -> Exception | None:
        return None

    def source_rank(self) -> int:
        self.wait()
        return super().source_rank() if self._source is None else self._source
