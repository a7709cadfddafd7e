"""torch's suite for the backend, the world size and the hosts that BACKEND, WORLD_SIZE and HOSTS
name."""

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

CHOOSES_BY_NAME = "test_accumulate_gradients_no_sync"
"""Tests with these prefixes create a CPU model if the backend is called gloo, and otherwise
none."""

_Backend: Any = distributed_test.TestDistBackend
_Tests: Any = distributed_test.DistributedTest._DistTestBase


class Suite(_Backend, _Tests):  # type: ignore[misc]
    """Every test of torch's suite; the ranks are forked from a process that has run no test."""

    def setUp(self) -> None:
        super().setUp()
        distributed_test.INIT_METHOD = os.environ["INIT_METHOD"]  # a folder of this test's own
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    @classmethod
    def _run(cls, rank: int, *args: Any, **named: Any) -> None:
        """What a rank does: if there are several hosts, it first learns which one it is on."""
        hosts, ranks = int(os.environ["HOSTS"]), int(os.environ["WORLD_SIZE"])
        if hosts > 1:
            os.environ["UNISONO_HOSTID"] = f"host{rank * hosts // ranks}"
        super()._run(rank, *args, **named)

    def run_test(self, name: str, pipe: Any) -> None:
        """What a rank does once it has joined the process group."""
        hosts, world = int(os.environ["HOSTS"]), torch.distributed.group.WORLD
        assert hosts == 1 or len(world.comm.transport.placement.hosts) == hosts  # type: ignore[union-attr]
        if name.startswith(CHOOSES_BY_NAME):
            distributed_test.BACKEND = "gloo"
        super().run_test(name, pipe)

    def _check_return_codes(self, test: Any, elapsed_s: float) -> None:
        """torch checks only rank 0; here every rank must have exited cleanly."""
        super()._check_return_codes(test, elapsed_s)
        codes = [process.exitcode for process in self.processes]
        assert not any(codes), f"exit codes of the ranks: {codes}"


def tests() -> list[str]:
    """The names of all tests, in the order of torch's file."""
    return [name for name in vars(_Tests) if name.startswith("test_")]
