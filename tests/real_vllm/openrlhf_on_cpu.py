"""OpenRLHF's worker, unchanged, on a machine without a GPU: what it wants on a GPU is on the
CPU."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from openrlhf.trainer.ray.vllm_worker_wrap import WorkerWrap
from torch.overrides import TorchFunctionMode


class _OnCpu(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = dict(kwargs or {})
        if given.get("device") == "cuda":
            given["device"] = "cpu"
        return function(*args, **given)


class OnCpu(WorkerWrap):
    def update_weight(self, name: str, dtype: str, shape: Any, empty_cache: bool = False) -> None:
        dtype = getattr(torch, dtype.removeprefix("torch."))  # types cannot be sent to workers here
        with _OnCpu(), mock.patch("torch.cuda.current_stream", return_value=None):
            super().update_weight(name, dtype, shape, empty_cache)
