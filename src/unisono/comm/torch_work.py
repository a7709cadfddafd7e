"""Works as torch.distributed knows them."""

from __future__ import annotations

<<<<<<< HEAD
from collections.abc import Sequence
=======
import queue
import threading
import types
from collections import deque
from collections.abc import Callable, Sequence
>>>>>>> programs
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from unisono.comm.base import Work
from unisono.comm.torch_futures import Completer, future_of

Tensors = Sequence[torch.Tensor]
<<<<<<< HEAD
=======
_KEPT_WORKS = 8
_Class = TypeVar("_Class", bound=type)
>>>>>>> programs


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
            awaited = self._was_awaited
            self._future = future_of(self._work, self._result, self._completer, awaited)
        return self._future


<<<<<<< HEAD
=======
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
>>>>>>> programs
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
