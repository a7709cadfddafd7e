"""Works for torch, and their Futures, for DDP and for `work.get_future()`.

After `work.wait()` the work's Future is complete and its callbacks have run, as on gloo.

DDP never calls `wait` on a work: it waits for the work's Future, in C++, where an exception of ours
would crash the process and Ctrl-C would be ignored. So a Future that is requested inside a backward
pass is completed by a callback of that pass, which waits in Python and may raise. If cores are idle
and all ranks have submitted the work, so that only data movement is left, the callback leaves it to
a thread: DDP copies finished buckets while the last ones are still moving, and a callback after
DDP's raises any error. Once the pass runs its callbacks (DDP's first step with a static graph
reduces there), another one would be too late: the Future is complete before it is returned. Any
other Future is completed by a thread.

When a Future of a backward pass completes does not depend on the speed of its work: its `then` may
call another collective, and all ranks must call it in the same order.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from unisono.comm.communicator import Communicator
from unisono.comm.work import FinishedWork, Work
from unisono.torch_support import never_compiled

_KEPT_WORKS = 8
_LOOK_EVERY_S = 0.0002
_LOOKS = 50


def future_of(work: Work, result: Any, completer: Completer, is_over: bool) -> WorkFuture:
    """A Future that will hold `result`, queued for completion."""
    future = WorkFuture(work, result)
    in_backward = _in_backward()
    is_too_late = in_backward and torch._C._current_autograd_node() is None
    if isinstance(work, FinishedWork) or is_too_late or (in_backward and is_over):
        future.finish()
    elif is_over:
        future.complete()
    elif not in_backward:
        completer.add(future)
    else:
        _queue_callback(partial(_end_in_backward, future, completer))
    return future


def _queue_callback(callback: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def _end_in_backward(future: WorkFuture, completer: Completer) -> None:
    """At the end of a pass: complete the Future, or let a thread do so while DDP copies."""
    if future.may_be_completed_by_thread() and _is_under_way(future.work):
        completer.add(future, whatever_happens=True)
        _queue_callback(future.finish)
    else:
        future.finish()


def _is_under_way(work: Work) -> bool:
    """Whether the work will finish soon, after a short wait for other ranks."""
    ask: Callable[[], bool | None] = getattr(work, "is_under_way", lambda: None)
    looks = 0
    while not work.is_completed() and (answer := ask()) is not None and looks < _LOOKS:
        if answer:
            return True
        looks += 1
        time.sleep(_LOOK_EVERY_S)
    return False


def _gpus_of(result: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.device]:
    """The GPUs of a result's tensors."""
    tensors = [result] if isinstance(result, torch.Tensor) else result
    return list({tensor.device for tensor in tensors if tensor.device.type == "cuda"})


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


@never_compiled
class WorkFuture(torch.futures.Future[Any]):
    """The Future of a work, or of a `then`.

    To wait for it in Python is to wait for the work, so that our exceptions and Ctrl-C get through.
    In a backward pass it never holds an exception: `finish` raises it.
    """

    def __init__(self, work: Work, result: Any, first: WorkFuture | None = None) -> None:
        self.gpus: list[Any]
        # A Future on GPUs also makes the waiter's streams wait.
        gpus: list[Any] = _gpus_of(result) if first is None else first.gpus
        super().__init__(devices=gpus)
        self.gpus = gpus
        self.work = work
        self._result = result
        self._has_callbacks = False
        self._first = first or self
        self._lock = threading.RLock()  # two threads may try to complete it; callbacks may wait
        self._is_complete = False
        self._may_fail = not _in_backward()
        self._error: BaseException | None = None

    def wait(self) -> Any:
        if not self.done():
            self._first.finish()
        return super().wait()

    def may_be_completed_by_thread(self) -> bool:
        """`then` may make a call, and all ranks must make it in the same order."""
        return not self._has_callbacks

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        self._has_callbacks = True
        super().add_done_callback(callback)

    def then(self, callback: Callable[[Any], Any]) -> Any:
        self._has_callbacks = True
        after = WorkFuture(self.work, None, self._first)

        def call(_: Any) -> None:
            try:
                result = callback(self)
            except BaseException as error:
                if not _in_backward():
                    after.set_exception(error)
                self._first._error = error
            else:
                after.set_result(result)

        super().then(call)
        if _in_backward() and self._first._error is not None:
            raise self._first._error
        return after

    def finish(self, limit_s: float | None = None) -> None:
        """Wait for the work here, complete the Future, and raise the work's error."""
        self.work.wait(limit_s)
        self.settle()
        if self._error is not None:
            raise self._error

    def settle(self, error: BaseException | None = None) -> None:
        """Complete the Future, unless it is complete; then all its callbacks have run."""
        with self._lock:
            if self._is_complete or (error is not None and not self._may_fail):
                return
            self._is_complete = True
            if error is None:
                self.set_result(self._result)
            else:
                self.set_exception(error)

    def complete(self, limit_s: float | None = None, whatever_happens: bool = False) -> None:
        """The same in a background thread. `whatever_happens`: complete it even after an error,
        which is raised elsewhere."""
        try:
            self.finish(limit_s)
        except BaseException as error:
            self.settle(None if whatever_happens else error)


class Completer:
    """Completes the Futures of a group's collectives if the program does not wait for them, in one
    thread because they finish in the order in which they started.

    It also keeps the latest one-element works alive: DDP's join starts one in each forward pass,
    holds only its C++ half, and waits for it in backward, forever if the Python half is gone.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._kept: deque[dist.Work] = deque(maxlen=_KEPT_WORKS)
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def keep(self, work: dist.Work, result: Sequence[torch.Tensor]) -> None:
        if len(result) == 1 and result[0].numel() == 1:
            self._kept.append(work)

    def add(self, future: WorkFuture, whatever_happens: bool = False) -> None:
        """Complete the Future; see its `complete`."""
        if self._thread is None:
            name = f"unisono futures of {self._comm.name}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()
        self._todo.put(partial(future.complete, whatever_happens=whatever_happens))

    def close(self) -> None:
        """Stop its thread."""
        self._kept.clear()
        if self._thread is not None:
            self._todo.put(None)

    def _run(self) -> None:
        while (complete := self._todo.get()) is not None:
            complete()


class MessageCompleter(Completer):
    """The same for messages, each in its own thread: a message may be matched long after later
    ones. The program itself goes on, so the wait has a time limit: a wait without one counts as the
    rank's own and could look like part of a deadlock."""

    def add(self, future: WorkFuture, whatever_happens: bool = False) -> None:
        name = f"unisono message of {self._comm.name}"
        args = self._comm.timeout_s, whatever_happens
        threading.Thread(target=future.complete, args=args, name=name, daemon=True).start()


@never_compiled
class TorchWork(dist.Work):
    """One of our works, for torch. `result` are the tensors that it fills."""

    def __init__(self, work: Work, result: Sequence[torch.Tensor], completer: Completer) -> None:
        super().__init__()
        self._work = work
        self._result = list(result)
        self._completer = completer
        self._future: Any = None
        self._is_over = False
        completer.keep(self, self._result)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        seconds = timeout.total_seconds()
        try:
            self._work.wait(seconds if seconds > 0 else None)
        except BaseException:  # the work's own error, or it goes on
            self._is_over = (failure := self._work.exception()) is not None
            if failure is not None and self._future is not None:
                self._future.settle(failure)
            raise
        self._is_over = True
        if self._future is not None:
            self._future.settle()
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
            self._future = future_of(self._work, self._result, self._completer, self._is_over)
        return self._future
