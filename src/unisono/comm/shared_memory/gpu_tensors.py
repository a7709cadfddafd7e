"""Tensors in a GPU's memory: the engine cannot read them, and what stands on this group does."""

from __future__ import annotations

import importlib
from typing import Any

from unisono.comm.base import Communicator


class GpuTensors(Communicator):
    """A group whose calls on CUDA tensors go on in `unisono.comm.cuda`."""

    _gpu: Any = None

    def _gpu_group(self) -> Communicator:
        """What carries out the calls of this group on tensors of a GPU, from the first one on."""
        if self._gpu is None:
            # By name, since it stands on this implementation, and needs torch.
            self._gpu = importlib.import_module("unisono.comm.cuda.group").GpuGroup(self)
        gpu: Communicator = self._gpu
        return gpu

    def _close_gpu_group(self) -> None:
        if self._gpu is not None:
            self._gpu.close()
