"""A checkpoint engine for verl, named "unisono".

verl imports this file in its actors and rollout workers, as its `custom_backend_module`, and then
looks it up in its registry. Actor 0 sends in buckets, and rollout workers pass on what arrives,
bucket by bucket, as with verl's own engines.
"""

from __future__ import annotations

import asyncio
import socket
import uuid
from collections.abc import AsyncGenerator, Iterable, Iterator
from typing import Any

import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from unisono.collectives.encoding import torch_dtype
from unisono.collectives.objects import broadcast_object
from unisono.comm.communicator import Communicator
from unisono.training.weights.by_parameter import WeightUpdateGroup
from unisono.training.weights.meeting import init_weight_update_group

Named = tuple[str, torch.Tensor]


@CheckpointEngineRegistry.register("unisono")
class UnisonoCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """One process's side. `bucket_size` is verl's: the bytes of a message; `device` is where
    rollout workers receive. When a process dies, the others' calls raise PeerLost at once; the next
    update makes a new group."""

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        device: str = "cuda" if torch.cuda.is_available() else "cpu",
        timeout_s: float | None = None,
    ) -> None:
        self.bucket_size, self.is_master = bucket_size, is_master
        self._device, self._timeout_s = device, timeout_s
        self._where: dict[str, Any] = {}
        self._joined: dict[str, Any] = {}
        self._group: WeightUpdateGroup | None = None
        self._rank = -1

    def prepare(self) -> dict[str, Any]:
        """Where all meet, chosen by actor 0: the existing group, or a new one."""
        if self.is_master and (self._group is None or self._comm.errored is not None):
            address = ray.util.get_node_ip_address() if ray.is_initialized() else "127.0.0.1"
            with socket.socket() as probe:
                probe.bind(("", 0))
                port = probe.getsockname()[1]
            name = f"verl {uuid.uuid4().hex}"
            self._where = {"master_address": address, "master_port": port, "group_name": name}
        return self._where if self.is_master else {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Actor 0 is rank 0, rollout workers follow, and other actors do not take part."""
        size = 1 + rollout_world_size

        def told(ranks: list[int]) -> dict[str, list[Any]]:
            count = len(ranks)
            return {"rank": ranks, "world_size": [size] * count, "where": [metadata[0]] * count}

        return told([0, *[-1] * (actor_wg_world_size - 1)]), told(list(range(1, size)))

    def init_process_group(self, rank: int, world_size: int, where: dict[str, Any]) -> None:
        """Meet the others, unless the last update's group still exists."""
        self._rank = rank
        if rank < 0 or (self._group is not None and where == self._joined):
            return
        if self._group is not None:
            self._group.close()
        self._group = init_weight_update_group(
            **where, rank_offset=rank, world_size=world_size, timeout_s=self._timeout_s
        )
        self._joined = where

    def finalize(self) -> None:
        """The group stays for the next update."""

    @torch.no_grad()
    async def send_weights(self, weights: Iterable[Named], global_steps: int | None = None) -> None:
        """Send what the generator yields. Every actor calls it because the generator gathers."""
        for bucket in self._buckets(weights):
            if self._rank == 0:
                await asyncio.to_thread(self._send, bucket)
        if self._rank == 0:
            await asyncio.to_thread(self._send, [])

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[Named, None]:
        """Yield names and tensors as they arrive."""
        while bucket := await asyncio.to_thread(self._receive):
            for named in bucket:
                yield named

    @property
    def _comm(self) -> Communicator:
        assert self._group is not None
        return self._group.comm

    def _buckets(self, weights: Iterable[Named]) -> Iterator[list[Named]]:
        bucket: list[Named] = []
        room = self.bucket_size
        for name, tensor in weights:
            room -= tensor.nbytes
            if bucket and room < 0:
                yield bucket
                bucket, room = [], self.bucket_size - tensor.nbytes
            bucket.append((name, tensor))
        if bucket:
            yield bucket

    def _send(self, bucket: list[Named]) -> None:
        described = [(name, str(each.dtype)[6:], tuple(each.shape)) for name, each in bucket]
        broadcast_object(described, 0, self._comm)
        if bucket:
            self._comm.broadcast([tensor for _, tensor in bucket], 0)

    def _receive(self) -> list[Named]:
        bucket = [
            (name, torch.empty(shape, dtype=torch_dtype(dtype), device=self._device))
            for name, dtype, shape in broadcast_object(None, 0, self._comm)
        ]
        if bucket:
            self._comm.broadcast([tensor for _, tensor in bucket], 0)
        return bucket
