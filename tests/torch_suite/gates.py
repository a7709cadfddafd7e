"""Which of torch's tests cannot run here, found before a process is started for them.

torch's tests are gated by decorators: some check the backend's name, some the number of GPUs, the
latter only once all ranks have started. `install` replaces them with others, which record every
reason why a test is skipped.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.testing._internal import common_distributed, common_utils

Decorator = Callable[[Any], Any]

LIFTED = (
    "Only gloo backend supports timeouts",
    "GLOO Batch Send Recv CPU",
    "Only Gloo backend supports sparse all reduce",
    "Only MPI supports CPU all_to_all_single",
    "Only MPI supports all_to_all",
    "get_future is only supported on mpi, nccl and gloo",
    "to be one of {'gloo'}",
    "Only Nccl & Gloo backend support DistributedDataParallel",
)
"""Suffixes of reasons that concern only a backend's name: these tests run on every backend."""

UNSUITED = dict.fromkeys(
    (
        "test_monitored_barrier_gloo",
        "test_monitored_barrier_gloo_subgroup",
        "test_monitored_barrier_gloo_rank_0_timeout",
        "test_monitored_barrier_failure_order",
        "test_monitored_barrier_wait_all_ranks",
    ),
    "torch refuses monitored_barrier for every backend but gloo; unisono.monitored_barrier is "
    "tested in tests/torch_backend/test_features_torch_keeps_to_gloo.py",
)
"""Tests of what only gloo can do, and why; they run on gloo."""


def gate(shut: bool, reason: str) -> Decorator:
    """A decorator that records `reason` if the test is to be skipped."""

    def decorate(test: Any) -> Any:
        if shut:
            test.shut_gates = [*getattr(test, "shut_gates", ()), reason]
        return test

    return decorate


def install() -> None:
    """Replace the gates; call it before `distributed_test` is imported, which imports them by
    name."""
    skips = common_distributed.TEST_SKIPS
    gpus, ranks = torch.cuda.device_count(), int(os.environ["WORLD_SIZE"])

    def needs_gpus(number: int, *, allow_cpu: bool = False) -> Decorator:
        enough = gpus >= number or (allow_cpu and gpus == 0)
        return gate(not enough, skips[f"multi-gpu-{number}"].message)

    utils: Any = common_utils
    utils.skip_but_pass_in_sandcastle = lambda reason: gate(True, reason)
    utils.skip_but_pass_in_sandcastle_if = gate
    distributed: Any = common_distributed
    distributed.skip_if_no_gpu = gate(gpus < ranks, skips["no_cuda"].message)
    distributed.skip_if_lt_x_gpu = needs_gpus
    distributed.skip_if_odd_worldsize = gate(ranks % 2 == 1, skips["odd_worldsize"].message)
    # It skips with fewer than 8 ranks; three are enough for every test that uses it.
    distributed.skip_if_small_worldsize = lambda test: test


def lifted(test: Any) -> str:
    """Why torch would not run a test that runs here; empty if it would."""
    return next((why for why in getattr(test, "shut_gates", ()) if why.endswith(LIFTED)), "")


def why_not(test: Any, name: str, backend: str) -> str:
    """Why a test cannot run; empty if it can."""
    shut = [why for why in getattr(test, "shut_gates", ()) if not why.endswith(LIFTED)]
    if shut:
        return shut[0]  # the innermost: what the test itself needs
    if getattr(test, "__unittest_skip__", False):
        return f"disabled by torch: {test.__unittest_skip_why__}"
    return "" if backend == "gloo" else UNSUITED.get(name, "")
