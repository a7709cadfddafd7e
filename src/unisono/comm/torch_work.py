"""Works as torch.distributed knows them, and the Futures that DDP waits for.

DDP never calls `wait` on a work: it waits for the work's Future, in C++, where an exception of
ours would crash the process and Ctrl-C would not be heard. So a Future that is asked for inside a
backward pass is completed by a callback of that pass, which waits in Python and may raise. Once
the pass has come to its callbacks (DDP's first step with a static graph reduces there), another
one would come too late: the Future is complete before it is handed out. Any other Future is
completed by a thread.

When a Future of a backward pass is complete does not depend on how fast its work was: what is to
be done `then` may be another collective, and all ranks must come to it in the same order.
"""

from __future__ import annotations

import queue
import threading
import types
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from unisono.comm.base import Work

Tensors = Sequence[torch.Tensor]
_KEPT_WORKS = 8
_Class = TypeVar("_Class", bound=type)


def never_compiled(cls: _Class) -> _Class:
    """Let torch.compile leave the methods of a class, and what they call, as they are.

    What `torch.compiler.disable` does, but that imports the compiler, which takes seconds.
    """
    dynamo: Any = torch._C._dynamo.eval_frame
    skip = dynamo._FrameAction.SKIP
    for method in vars(cls).values():
        if isinstance(method, types.FunctionType):
            dynamo.set_code_exec_strategy(method.__code__, dynamo._FrameExecStrategy(skip, skip))
    return cls


@never_compiled
class TorchWork(dist.Work):
    """One of our works, for torch. `result` are the tensors that it fills."""

    def __init__(self, work: Work, result: Tensors, completer: Completer) -> None:
        super().__init__()
        self._work = work
        self._result = list(result)
        self._completer = completer
        self._future: Any = None
        self._was_awaited = False
        completer.keep(self, self._result)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        seconds = timeout.total_seconds()
        self._was_awaited = True
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
            self._future = WorkFuture(self._work, self._result)
            if not _in_backward():
                self._completer.add(self._future.complete)
            elif self._was_awaited or torch._C._current_autograd_node() is None:
                self._future.finish()
            else:
                torch.autograd.Variable._execution_engine.queue_callback(self._future.finish)
        return self._future


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


@never_compiled
class WorkFuture(torch.futures.Future[Any]):
    """The Future of a work, or of what was to be done `then`.

    Whoever waits for it in Python waits for the work, so that our exceptions come as they are and
    Ctrl-C is heard. In a backward pass it never holds an exception: `finish` raises it.
    """

    def __init__(self, work: Work, result: Any, first: WorkFuture | None = None) -> None:
        super().__init__()
        self._work = work
        self._result = result
        self._first = first or self
        self._lock = threading.RLock()  # two threads may want to complete it; callbacks may wait
        self._is_complete = False
        self._error: BaseException | None = None

    def wait(self) -> Any:
        if not self.done():
            self._first.finish()
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> Any:
        after = WorkFuture(self._work, None, self._first)

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

    def finish(self) -> None:
        """Wait for the work here, complete the Future, and raise what went wrong."""
        self._work.wait()
        with self._lock:
            if not self._is_complete:
                self._is_complete = True
                self.set_result(self._result)
        if self._error is not None:
            raise self._error

    def complete(self) -> None:
        """The same for a thread to which nobody listens."""
        try:
            self.finish()
        except BaseException as error:
            with self._lock:
                if not self._is_complete:
                    self._is_complete = True
                    self.set_exception(error)


@never_compiled
class FinishedTorchWork(dist.Work):
    """What was over before torch could wait for it."""

    def __init__(self, result: Tensors, completer: Completer) -> None:
        super().__init__()
        self._result = list(result)
        completer.keep(self, self._result)

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


class Completer:
    """A thread of a group that completes Futures, started when the first one is asked for.

    It also keeps the latest works on one element. DDP's join starts one in each forward pass, holds
    its C++ half alone, and waits for that in backward: for ever, if the Python half is gone.
    """

    def __init__(self, name: str) -> None:
        self._kept: deque[dist.Work] = deque(maxlen=_KEPT_WORKS)
        self._name = name
        self._todo: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def keep(self, work: dist.Work, result: Tensors) -> None:
        if len(result) == 1 and result[0].numel() == 1:
            self._kept.append(work)

    def add(self, complete: Any) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name=f"unisono futures of {self._name}", daemon=True
            )
            self._thread.start()
        self._todo.put(complete)

    def close(self) -> None:
        """End the thread once it has done what it was given."""
        self._kept.clear()
        if self._thread is not None:
            self._todo.put(None)

    def _run(self) -> None:
        while (complete := self._todo.get()) is not None:
            complete()
