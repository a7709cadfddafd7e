"""`unisono.debug_communication`: the self-test on the group at hand."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from unisono.comm.base import Communicator, Group
from unisono.doctor.selftest.calls import PreparedCall, prepared_calls
from unisono.doctor.selftest.results import Check, SelfTest
from unisono.doctor.selftest.verdicts import collect_verdicts
from unisono.requirements import require_torch
from unisono.world.world import resolve

if TYPE_CHECKING:
    import torch


def debug_communication(
    group: Group = None,
    *,
    device: torch.device | str | None = None,
    elements: int = 1000,
    repeats: int = 5,
    show: bool = True,
) -> SelfTest:
    """Run every primitive on this group and compare the results with what they must be.

    Call it on every rank of `group` (a Communicator, a torch process group, or None for the world).
    Tensors lie on `device`: without, on the CPU, or this rank's GPU under nccl; each rank's part
    has `elements` of them, and each primitive is called `repeats` times. Every rank gets the same
    verdicts, and rank 0 prints them unless `show` is False. A primitive that is wrong or raises is
    a check that is not `ok`; after a fault that ended the group the rest is not run.

    Raises UnisonoError if there is no such group, and nothing else.

    >>> test = unisono.debug_communication(show=False)
    >>> [check.primitive for check in test.checks if not check.ok]
    []
    """
    require_torch("unisono.debug_communication")
    import torch

    comm = resolve(group)
    backend = getattr(comm, "backend", "unisono")
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else "cpu"
    checks: list[Check] = []
    for primitive, prepare in prepared_calls(comm, elements, torch.device(device)):
        if comm.errored is not None:
            checks.append(Check(primitive, False, math.nan, "not run: the group has ended"))
        else:
            checks.append(_check(comm, primitive, prepare, repeats))
    agreed = collect_verdicts(comm, checks, torch.device(device))
    result = SelfTest(comm.name, backend, comm.rank, comm.size, agreed)
    if show and (comm.rank == 0 or (comm.errored is not None and not result.ok)):
        print(result, file=sys.stderr if comm.rank else sys.stdout, flush=True)
    return result


def _check(
    comm: Communicator, primitive: str, prepare: Callable[[], PreparedCall], repeats: int
) -> Check:
    """Make every one of the calls, whatever becomes of the first: the others make them too."""
    times_us: list[float] = []
    problem = ""
    for _ in range(max(1, repeats)):
        try:
            prepared = prepare()
            comm.barrier()  # else the time of a call would be the lateness of the others
            start = time.perf_counter()
            prepared.call()
            result = [tensor.cpu() for tensor in prepared.result]  # a GPU is done when it is here
            times_us.append((time.perf_counter() - start) * 1e6)
            problem = problem or _difference(result, prepared.expected)
        except Exception as error:
            problem = problem or f"{type(error).__name__}: {error}"
        if comm.errored is not None:
            break
    median_us = statistics.median(times_us) if times_us else math.nan
    return Check(primitive, not problem, median_us, problem)


def _difference(result: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> str:
    """Where the first wrong number is; nothing if there is none."""
    import torch

    for mine, right in zip(result, expected, strict=True):
        far = ~torch.isclose(mine, right, rtol=1e-6, atol=0)  # a mean may be rounded twice
        if far.any():
            index = int(far.nonzero()[0])
            return f"element {index} is {mine[index].item():g} and must be {right[index].item():g}"
    return ""
