"""torch's suite for the backend and the world size that BACKEND and WORLD_SIZE name."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.testing._internal import common_distributed

from torch_suite import gates

BACKEND = os.environ["BACKEND"]
common_distributed.DistTestCases.backend_feature["plugin"].add(BACKEND)
for _backends in common_distributed.DistTestCases.backend_feature.values():
    _backends.add(BACKEND)
gates.install()

from torch.testing._internal.distributed import distributed_test  # noqa: E402

_Backend: Any = distributed_test.TestDistBackend
_Tests: Any = distributed_test.DistributedTest._DistTestBase


class Suite(_Backend, _Tests):  # type: ignore[misc]
    """Every test of torch's suite; the ranks are forked from a process that has run nothing."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    def _check_return_codes(self, test: Any, elapsed_s: float) -> None:
        """torch looks at rank 0 alone; here every rank must have ended well."""
        super()._check_return_codes(test, elapsed_s)
        codes = [process.exitcode for process in self.processes]
        self.assertEqual(codes, [0] * len(codes), msg=f"exit codes of the ranks: {codes}")


def tests() -> list[str]:
    """The names of all tests, in the order of torch's file."""
    return [name for name in vars(_Tests) if name.startswith("test_")]
