"""unisono in verl's registry: the calls of verl's manager, in its order, in real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import unisono
from ranks import RankPool, raised
from unisono import Communicator, PeerLost

pytestmark = pytest.mark.vllm

ACTORS = 2
IMPORTS_S = 400.0
"""verl imports vLLM, which takes minutes for four ranks at once on two busy cores."""
SHAPES = {"embed": (64, 32), "norm": (32,), "large": (300, 70), "scalar": ()}


def weights_of(version: int) -> Iterator[tuple[str, torch.Tensor]]:
    for number, (name, shape) in enumerate(SHAPES.items()):
        yield name, torch.full(shape, version + number / 8, dtype=torch.bfloat16)


def start(comm: Communicator, rank: int) -> Any:
    """An engine from verl's own registry."""
    from verl.checkpoint_engine.base import CheckpointEngineRegistry
    from verl.utils.import_utils import import_external_libs

    import_external_libs("unisono.training.weights.verl_engine")
    options = {"bucket_size": 5000, "is_master": rank == 0, "device": "cpu", "timeout_s": 60.0}
    return CheckpointEngineRegistry.new("unisono", **options)


def build(engine: Any, comm: Communicator) -> None:
    """What verl's manager does before every update."""
    metadata = unisono.all_gather_object(engine.prepare(), comm)
    actors, rollouts = type(engine).build_topology(ACTORS, comm.size - ACTORS, metadata)
    told, number = (actors, comm.rank) if comm.rank < ACTORS else (rollouts, comm.rank - ACTORS)
    engine.init_process_group(**{name: values[number] for name, values in told.items()})


def update(engine: Any, rank: int, version: int) -> None:
    if rank < ACTORS:
        asyncio.run(engine.send_weights(weights_of(version), global_steps=version))
        return

    async def receive() -> dict[str, torch.Tensor]:
        return {name: tensor async for name, tensor in engine.receive_weights(version)}

    found = asyncio.run(receive())
    expected = dict(weights_of(version))
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_verls_calls(pool: RankPool) -> None:
    pool.run(update_twice, 4, connected=False, deadline_s=IMPORTS_S)


def update_twice(rank: int, size: int, path: str) -> None:
    with Communicator.join(f"{path} verl", rank, size) as comm:
        engine = start(comm, rank)
        for version in (1, 2):
            build(engine, comm)
            update(engine, rank, version)
            engine.finalize()


def test_a_rollout_worker_that_dies(fresh_pool: RankPool) -> None:
    *others, dead = fresh_pool.outcomes(lose_a_worker, 4, connected=False, deadline_s=IMPORTS_S)
    assert dead.exit_code == -signal.SIGKILL
    for outcome in others:
        assert outcome.error is None, outcome.error


def lose_a_worker(rank: int, size: int, path: str) -> None:
    comm = Communicator.join(f"{path} verl", rank, size)
    engine = start(comm, rank)
    build(engine, comm)
    update(engine, rank, 1)
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin_s = time.monotonic()
    if rank == 1:  # it only walks the generator
        update(engine, rank, 2)
    else:
        raised(PeerLost, update, engine, rank, 2)
    assert time.monotonic() - begin_s < 10
    comm.close()
    with Communicator.join(f"{path} again", rank, size - 1) as left:
        build(engine, left)
        update(engine, rank, 3)
