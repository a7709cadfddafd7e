"""Works as torch.distributed knows them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from unisono.comm.work import Work
from unisono.torch_backend.futures import Completer, future_of
from unisono.torch_support import never_compiled

Tensors = Sequence[torch.Tensor]


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
