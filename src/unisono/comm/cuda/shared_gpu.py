"""What one rank has for calls on a GPU that all ranks of its group share."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

import torch

from unisono.comm.cuda.conducting import Orchestra
from unisono.comm.cuda.driver import Driver
from unisono.comm.cuda.regions import ExportedMemory, RankMemory
from unisono.comm.cuda.staging import Staging

STAGED_BYTES = 512 << 10
"""What moves no more than this goes through pinned memory: a turn of every rank on the GPU takes
longer."""

_PINNED_BYTES = 8 * STAGED_BYTES
_log = logging.getLogger("unisono")


class SharedGpu:
    """Pinned memory, and where the driver allows it the means for one rank to work in everybody's
    memory (`orchestra`; None: all calls are staged)."""

    def __init__(self, driver: Driver | None, orchestra: Orchestra | None) -> None:
        self.staging = Staging(driver, _PINNED_BYTES)
        self.orchestra = orchestra
        self.exported = ExportedMemory(driver)
        self._has_warned = False

    def describe(self, rows: Sequence[torch.Tensor], moved_bytes: int) -> RankMemory:
        """What the others are told of this rank's rows."""
        places = [(row.data_ptr(), row.nbytes) for row in rows]
        return self.exported.describe(places, moved_bytes, self.orchestra is not None)

    def warn_of_staging(self, rank: int, why: str) -> None:
        """Rank 0 says once that large calls are slow."""
        if rank == 0 and not self._has_warned:
            _log.warning(
                "unisono: large calls on CUDA tensors go through the CPU's memory, at a few GB/s, "
                "for the driver does not let processes open each other's (%s). Expandable segments "
                "(PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True) and MIG are known reasons: "
                "docs/cuda.md",
                why,
            )
        self._has_warned = True

    def close(self) -> None:
        """Give everything back."""
        orchestra, self.orchestra = self.orchestra, None
        if orchestra is not None:
            with contextlib.suppress(RuntimeError):
                orchestra.close()
