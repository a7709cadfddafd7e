"""torch programs in which a rank fails: the others raise our exceptions, wherever they wait."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_new_group_faults import check_losses, die, find_loss, start
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ranks
from ranks import RankPool, signalled_while_waiting
from unisono.comm.meeting import leading
from unisono.errors import CollectiveMismatch, CollectiveTimeout, GroupAborted, PeerLost
from user_programs import eventually

ranks.preload("torch._dynamo")  # DDP imports it, which takes seconds
LIMIT_S = 1.5  # in which rank 0 comes as well: otherwise rank 1 would miss it
WITHIN_S = 2.0  # measured: 0.03 to 0.08 s; the rest is for a busy machine


def ddp(model: torch.nn.Module, **options: Any) -> Any:
    return DistributedDataParallel(model, bucket_cap_mb=0.01, **options)


def static(model: torch.nn.Module) -> Any:
    return ddp(model, static_graph=True)


def with_fp16(model: torch.nn.Module) -> Any:
    wrapped = ddp(model)
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return wrapped


def with_power_sgd(model: torch.nn.Module) -> Any:
    wrapped = ddp(model)
    state = powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return wrapped


def fsdp(model: Any) -> Any:
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def with_idle_cores(model: torch.nn.Module) -> Any:
    """On its own group, which assumes that the machine has more cores than it has."""
    usual, leading._cores = leading._cores, lambda everyone, sharers: 4 * len(everyone)
    try:
        return ddp(model, process_group=dist.new_group(backend="unisono"))
    finally:
        leading._cores = usual


Wrap = Callable[[torch.nn.Module], Any]
WRAPS = [ddp, static, with_fp16, with_power_sgd, fsdp]


def warm(wrap: Wrap, steps: int = 3) -> tuple[Any, Any]:
    """A model of six layers, and the wrapped model, after some steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
    wrapped = wrap(model)
    for _ in range(steps):
        loss(wrapped).backward()
    return model, wrapped


def loss(model: Any) -> torch.Tensor:
    total: torch.Tensor = model(torch.ones(2, 64, requires_grad=True)).sum()
    return total


def in_the_middle(model: Any, fault: Callable[[], Any]) -> None:
    """Make this rank do something when backward reaches its fourth layer."""
    model[3].register_full_backward_hook(lambda *_: fault() and None)


# -- a rank dies -----------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [*WRAPS, with_idle_cores], ids=lambda wrap: wrap.__name__)
@pytest.mark.parametrize("steps", [0, 3], ids=["in the first step", "in a later step"])
def test_backward_raises_when_a_rank_dies(fresh_pool: RankPool, wrap: Wrap, steps: int) -> None:
    outcomes = fresh_pool.outcomes(die_in_backward, 3, wrap, steps, connected=False)
    check_losses(outcomes, 2, "", WITHIN_S)


def die_in_backward(rank: int, size: int, path: str, wrap: Wrap, steps: int) -> Any:
    start(rank, size, path)
    model, wrapped = warm(wrap, steps)
    if rank == 2:
        in_the_middle(model, lambda: die(path))
    return find_loss(path, loss(wrapped).backward)


# -- a rank does something else --------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrap", WRAPS, ids=lambda wrap: wrap.__name__)
def test_backward_raises_when_a_rank_calls_something_else(process_group: Any, wrap: Wrap) -> None:
    model, wrapped = warm(wrap)
    if dist.get_rank() == 1:
        in_the_middle(model, lambda: dist.broadcast(torch.ones(3), 0))
    with pytest.raises(CollectiveMismatch, match="rank 1: broadcast of float32, 3 elements"):
        loss(wrapped).backward()
    with pytest.raises(CollectiveMismatch):
        dist.barrier()


# -- a rank does not come --------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrap", [ddp, with_power_sgd, fsdp], ids=lambda wrap: wrap.__name__)
def test_backward_raises_when_a_rank_does_not_come(
    process_group: Any, wrap: Wrap, shared_tmp_path: Path
) -> None:
    model, wrapped = warm(wrap)
    process_group.set_timeout(timedelta(seconds=LIMIT_S))
    over = shared_tmp_path / "over"
    if dist.get_rank() == 1:
        in_the_middle(model, lambda: eventually(over.exists))
    begin_s = time.monotonic()
    with pytest.raises(CollectiveTimeout, match="rank 1") as raised:
        loss(wrapped).backward()
    if dist.get_rank() == 0:
        assert raised.value.missing == (1,)
        took_s = time.monotonic() - begin_s
        assert took_s < LIMIT_S + WITHIN_S + 0.5  # half a second for rank 1's answer
        over.touch()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrap", [ddp, fsdp, with_idle_cores], ids=lambda wrap: wrap.__name__)
def test_ctrl_c_ends_a_backward_that_waits_for_a_stopped_rank(
    process_group: Any, wrap: Wrap
) -> None:
    model, wrapped = warm(wrap)
    pids: list[Any] = [None, None]
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank() == 1:
        in_the_middle(model, lambda: os.kill(os.getpid(), signal.SIGSTOP))
        with suppress(GroupAborted, PeerLost):  # what rank 0 has started continues
            loss(wrapped).backward()
        return
    try:
        with signalled_while_waiting() as moment, pytest.raises(KeyboardInterrupt):
            loss(wrapped).backward()
        assert time.monotonic() - moment[0] < WITHIN_S
    finally:
        os.kill(pids[1], signal.SIGCONT)


# -- works and their Futures -----------------------------------------------------------------------

WAITS: dict[str, Callable[[Any], Any]] = {
    "wait": lambda work: work.wait(),
    "a Future": lambda work: work.get_future().wait(),
    "what comes then": lambda work: work.get_future().then(lambda done: done.value()).wait(),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wait", WAITS)
def test_waiting_raises_when_a_rank_calls_something_else(process_group: Any, wait: str) -> None:
    with pytest.raises(CollectiveMismatch):
        WAITS[wait](dist.all_reduce(torch.ones(1 + dist.get_rank()), async_op=True))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wait", WAITS)
def test_waiting_raises_when_a_rank_leaves(process_group: Any, wait: str) -> None:
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        return
    with pytest.raises(PeerLost):
        WAITS[wait](dist.all_reduce(torch.ones(1), async_op=True))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wait", WAITS)
def test_waiting_raises_when_a_rank_does_not_come(
    process_group: Any, wait: str, shared_tmp_path: Path
) -> None:
    over = shared_tmp_path / "over"
    brief: Any = dist.new_group()
    brief.set_timeout(timedelta(seconds=0.2))  # of its calls; its ranks may meet a little later
    if dist.get_rank() == 1:
        assert eventually(over.exists)
        return
    with pytest.raises(CollectiveTimeout, match="rank 1"):
        WAITS[wait](dist.all_reduce(torch.ones(1), group=brief, async_op=True))
    over.touch()


@pytest.mark.ranks(2)
def test_an_exception_of_a_hook_comes_out_of_backward(process_group: Any) -> None:
    model = torch.nn.Linear(2, 2)
    wrapped = DistributedDataParallel(model)

    def fail(_: Any) -> torch.Tensor:
        raise LookupError("in a hook")

    def hook(_, bucket):  # type: ignore[no-untyped-def]  # torch looks at the annotations
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(fail)

    wrapped.register_comm_hook(None, hook)
    with pytest.raises(LookupError, match="in a hook"):
        wrapped(torch.ones(1, 2)).sum().backward()
