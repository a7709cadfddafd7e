"""unisono as a backend of ray.util.collective, in actors on a small cluster (`make test-ray`)."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch

pytestmark = pytest.mark.ray

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'unisono[ray]'")
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Member:
    """An actor that makes all calls of ray.util.collective."""

    def __init__(self, rank: int, size: int, group: str) -> None:
        from ray.util import collective

        from unisono.training.ray_group import UnisonoGroup

        collective.register_collective_backend("unisono", UnisonoGroup)
        collective.init_collective_group(size, rank, backend="unisono", group_name=group)
        self.rank, self.size, self.group = rank, size, group

    def make_all_calls(self) -> dict[str, Any]:
        from ray.util import collective
        from ray.util.collective.types import ReduceOp

        rank, size, group = self.rank, self.size, self.group
        mine = torch.full((4,), float(rank + 1))
        found = {}
        collective.allreduce(total := mine.clone(), group)
        found["allreduce"] = total.tolist()
        collective.allreduce(most := numpy.array([rank, -rank]), group, ReduceOp.MAX)
        found["allreduce of an array"] = most.tolist()
        collective.reduce(at_one := mine.clone(), 1, group)
        found["reduce"] = at_one.tolist()
        collective.broadcast(weight := mine.clone(), 1, group)
        found["broadcast"] = weight.tolist()
        everyone = [torch.empty(4) for _ in range(size)]
        collective.allgather(everyone, mine, group)
        found["allgather"] = [each[0].item() for each in everyone]
        collective.reducescatter(
            part := torch.empty(4), [mine * (n + 1) for n in range(size)], group
        )
        found["reducescatter"] = part.tolist()
        if rank == 0:
            collective.send(mine, 1, group)
        elif rank == 1:
            collective.recv(message := torch.empty(4), 0, group)
            found["recv"] = message.tolist()
        collective.barrier(group)
        return found

    def wait_for_one_that_dies(self) -> tuple[str, float]:
        from ray.util import collective

        collective.barrier(self.group)
        begin_s = time.monotonic()
        try:
            collective.barrier(self.group)
        except Exception as error:
            return type(error).__name__, time.monotonic() - begin_s
        return "nothing", 0.0

    def die(self) -> None:
        from ray.util import collective

        collective.barrier(self.group)
        import os

        os._exit(1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()


def members(count: int, group: str) -> list[Any]:
    return [ray.remote(num_cpus=1)(Member).remote(rank, count, group) for rank in range(count)]


def test_every_call_of_ray_does_what_it_says(cluster: None) -> None:
    actors = members(3, "calls")
    for rank, found in enumerate(ray.get([actor.make_all_calls.remote() for actor in actors])):
        assert found["allreduce"] == [6.0] * 4
        assert found["allreduce of an array"] == [2, 0]
        assert found["reduce"] == [6.0 if rank == 1 else rank + 1.0] * 4
        assert found["broadcast"] == [2.0] * 4
        assert found["allgather"] == [1, 2, 3]
        assert found["reducescatter"] == [6.0 * (rank + 1)] * 4
        assert rank != 1 or found["recv"] == [1.0] * 4
    for actor in actors:
        ray.kill(actor)


def test_an_actor_that_dies_is_noticed_at_once(cluster: None) -> None:
    actors = members(3, "deaths")
    waiting = [actor.wait_for_one_that_dies.remote() for actor in actors[:2]]
    actors[2].die.remote()
    for name, seconds in ray.get(waiting):
        assert name == "PeerLost"
        assert seconds < 10
