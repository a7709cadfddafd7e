"""Works as torch.distributed knows them, and the Futures that DDP waits for.

DDP never calls `wait` on a work: it waits for the work's Future, in C++, where an exception of
ours would crash the process and Ctrl-C would not be heard. So a Future that is asked for inside a
backward pass is completed by a callback of that pass, which waits in Python and may raise. Any
other Future is completed by a thread.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from datetime import timedelta
from threading import Thread
from typing import Any, Protocol

import torch
import torch.distributed as dist

from unisono.comm.base import Communicator, Work

Tensors = Sequence[torch.Tensor]


class TorchWork(dist.Work):
    """One of our works, for torch. `result` are the tensors that it fills."""

    def __init__(self, work: Work, result: Tensors, completer: Completer) -> None:
        super().__init__()
        self._work = work
        self._result = list(result)
        self._completer = completer
        self._future: Any = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        seconds = timeout.total_seconds()
        self._work.wait(seconds if seconds > 0 else None)
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_completed() and self._work.exception() is None

    def exception(self) -> Any:
        return self._work.exception()

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        return self._result

    def source_rank(self) -> int:
        return self._work.source_rank()

    _source_rank = source_rank

    def get_future(self) -> Any:
        if self._future is None:
            self._future = torch.futures.Future()
            if torch._C._current_graph_task_id() != -1:  # in a backward pass
                torch.autograd.Variable._execution_engine.queue_callback(self._finish)
            elif self._work.is_completed():
                self._complete()
            else:
                self._completer.add(self._complete)
        return self._future

    def _finish(self) -> None:
        """Wait in Python, and raise there."""
        self._work.wait()
        self._future.set_result(self._result)

    def _complete(self, limit_s: float | None = None) -> None:
        try:
            self._work.wait(limit_s)
        except Exception as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(self._result)


class FinishedTorchWork(dist.Work):
    """What was over before torch could wait for it."""

    def __init__(self, result: Tensors) -> None:
        super().__init__()
        self._result = list(result)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        return self._result

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(self._result)
        return future


class Completer(Protocol):
    """Who calls `complete` where the program does not wait: it returns when the Future has its
    result, or after so many seconds with an exception as the result."""

    def add(self, complete: Callable[..., None]) -> None: ...


class CollectiveCompleter:
    """A thread of a group that completes the Futures of collectives, which end in the order in
    which they began; started when the first one is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._todo: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: Thread | None = None

    def add(self, complete: Callable[..., None]) -> None:
        if self._thread is None:
            self._thread = Thread(
                target=self._run, name=f"unisono futures of {self._name}", daemon=True
            )
            self._thread.start()
        self._todo.put(complete)

    def close(self) -> None:
        """End the thread once it has done what it was given."""
        if self._thread is not None:
            self._todo.put(None)

    def _run(self) -> None:
        while (complete := self._todo.get()) is not None:
            complete()


class MessageCompleter:
    """A thread for the Future of each message: it may be matched long after those that began
    later. The program itself may go on, so the wait has a limit: one without counts as the
    rank's own and could be taken for part of a deadlock."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def add(self, complete: Callable[..., None]) -> None:
        name = f"unisono message of {self._comm.name}"
        Thread(target=complete, args=(self._comm.timeout_s,), name=name, daemon=True).start()
