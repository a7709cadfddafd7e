"""Who carries out the calls of a group over torch, one after the other, and their works.

gloo's and mpi's calls block in C++, deaf to Ctrl-C, and what they are composed of (a call, a
division, copying back) must go on by itself: one thread per group carries them out in order. nccl's
calls are over once the device has them in its queue, so that the caller's own thread makes them,
on a stream beside its own.
"""

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

from unisono.comm.base import Work
from unisono.errors import CollectiveTimeout

Job = Callable[[], Any]
_cuda: Any = torch.cuda  # torch has no types for it


class ThreadWork(Work):
    """What a thread carries out. It holds the job, and so its tensors, until that is done."""

    __slots__ = ("_doing", "_done", "_error", "_job", "_result")

    def __init__(self, job: Job, doing: str) -> None:
        self._job: Job | None = job
        self._doing = doing
        self._done = threading.Event()
        self._error: Exception | None = None
        self._result: Any = None

    def carry_out(self) -> None:
        """Called by the thread."""
        assert self._job is not None
        try:
            with torch.inference_mode():  # tensors of either kind may be written to
                self._result = self._job()
        except Exception as error:
            self._error = error
        self._job = None
        self._done.set()

    def wait(self, timeout_s: float | None = None) -> None:
        if not self._done.wait(timeout_s):
            raise CollectiveTimeout(f"{self._doing} is still under way")
        if self._error is not None:
            raise copy.copy(self._error) from self._error.__cause__

    def is_completed(self) -> bool:
        return self._done.is_set()

    def exception(self) -> Exception | None:
        return self._error

    def source_rank(self) -> int:
        self.wait()
        return super().source_rank() if self._result is None else int(self._result)


class StreamWork(Work):
    """What a device carries out; `end` is the moment in its queue when it has."""

    __slots__ = ("_doing", "_end", "_kept")

    def __init__(self, end: Any, kept: Any, doing: str) -> None:
        self._end = end
        self._kept = kept
        self._doing = doing

    def wait(self, timeout_s: float | None = None) -> None:
        """As of nccl's own works, what the caller's stream does next comes after it; with a limit,
        the caller waits as well."""
        if timeout_s is not None:
            deadline = time.monotonic() + timeout_s
            while not self._end.query():
                if time.monotonic() > deadline:
                    raise CollectiveTimeout(f"{self._doing} is still under way")
                time.sleep(0.0002)
        self._end.wait()
        self._kept = None

    def is_completed(self) -> bool:
        return bool(self._end.query())

    def exception(self) -> Exception | None:
        return None


class ThreadExecutor:
    """The thread of one group; it starts with the first job, and ends with this object."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._works: queue.SimpleQueue[ThreadWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._latest: ThreadWork | None = None
        self._end = weakref.finalize(self, self._works.put, None)

    def begin(self, job: Job, doing: str) -> ThreadWork:
        """Have it carried out after everything that was begun before."""
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
        """Whether everything that was begun is over."""
        return self._latest is None or self._latest.is_completed()

    def finish(self) -> None:
        """Return once everything that was begun is over, well or not."""
        if self._latest is not None:
            with contextlib.suppress(Exception):
                self._latest.wait()

    def close(self) -> None:
        """Carry out what was begun, then end."""
        self._end()

    @staticmethod
    def run_beside(job: Job, doing: str) -> ThreadWork:
        """Have it carried out beside everything else, in a thread of its own."""
        work = ThreadWork(job, doing)
        threading.Thread(target=work.carry_out, name=f"unisono {doing}", daemon=True).start()
        return work


def _serve(works: queue.SimpleQueue[ThreadWork | None]) -> None:
    while (work := works.get()) is not None:
        work.carry_out()
        work = None


class StreamExecutor:
    """The stream of one group on each device, beside the caller's."""

    def __init__(self) -> None:
        self._of: dict[torch.device, Any] = {}

    def begin(self, job: Job, doing: str, device: torch.device, kept: Any) -> StreamWork:
        """Queue what `job` asks for behind what the caller's stream has to do so far."""
        beside = self._of.get(device)
        if beside is None:
            beside = self._of[device] = _cuda.Stream(device)
        beside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(beside), torch.inference_mode():
            job()
            for tensor in kept:
                tensor.record_stream(beside)  # whoever drops the work may drop the tensors, too
            end = _cuda.Event()
            end.record(beside)
        return StreamWork(end, kept, doing)


def in_order_of_streams(job: Job, device: torch.device) -> Job:
    """For a backend that blocks, and a device's tensors: begin after what the caller's stream has
    to do so far, and end when the device has."""
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
