"""A backend of ray.util.collective: `register_collective_backend("unisono", UnisonoGroup)`.

It takes torch tensors and NumPy arrays, one per call. Rank 0 hosts a store, whose address is in
Ray's key-value store.
"""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.experimental import internal_kv
from ray.util.collective import types
from ray.util.collective.collective_group.base_collective_group import BaseGroup
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from unisono.comm.communicator import Communicator
from unisono.comm.meeting.deadline import JOIN_TIMEOUT_S, Deadline
from unisono.errors import RendezvousError
from unisono.training.weights.stateless import name_in


class UnisonoGroup(BaseGroup):  # type: ignore[misc]
    """One actor's side of a group. If an actor dies, the others raise PeerLost at once."""

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        key = f"unisono collective group {group_name}"
        self._store = _store_by(key, rank, world_size)
        self._comm = Communicator.join(name_in(self._store, rank), rank, world_size, self._store)
        if rank == 0:  # all have arrived
            internal_kv._internal_kv_del(key)

    def destroy_group(self) -> None:
        self._comm.close()
        self._store = None

    @classmethod
    def backend(cls) -> str:
        return "UNISONO"

    @classmethod
    def check_backend_availability(cls) -> bool:
        return True

    # Ray passes each tensor in a list of one.

    def allreduce(self, tensor: Any, allreduce_options: Any = types.AllReduceOptions()) -> None:  # noqa: B008
        self._comm.all_reduce(_only(tensor), allreduce_options.reduceOp)

    def barrier(self, barrier_options: Any = types.BarrierOptions()) -> None:  # noqa: B008
        self._comm.barrier()

    def reduce(self, tensor: Any, reduce_options: Any = types.ReduceOptions()) -> None:  # noqa: B008
        self._comm.reduce(_only(tensor), reduce_options.root_rank, reduce_options.reduceOp)

    def allgather(
        self,
        tensor_list: Any,
        tensor: Any,
        allgather_options: Any = types.AllGatherOptions(),  # noqa: B008
    ) -> None:
        self._comm.all_gather(_only(tensor_list), _only(tensor))

    def broadcast(self, tensor: Any, broadcast_options: Any = types.BroadcastOptions()) -> None:  # noqa: B008
        self._comm.broadcast(_only(tensor), broadcast_options.root_rank)

    def reducescatter(
        self,
        tensor: Any,
        tensor_list: Any,
        reducescatter_options: Any = types.ReduceScatterOptions(),  # noqa: B008
    ) -> None:
        options = reducescatter_options
        self._comm.reduce_scatter(_only(tensor), _only(tensor_list), options.reduceOp)

    def send(self, tensor: Any, send_options: types.SendOptions) -> None:
        self._comm.send(_only(tensor), send_options.dst_rank)

    def recv(self, tensor: Any, recv_options: types.RecvOptions) -> None:
        self._comm.recv(_only(tensor), recv_options.src_rank)


def _only(given: Any) -> Any:
    if len(given) != 1:
        raise ValueError(f"unisono takes one tensor per process, not {len(given)}")
    return given[0]


def _store_by(key: str, rank: int, size: int) -> Any:
    """The store that rank 0 hosts, found through Ray's key-value store."""
    if rank == 0:
        address = ray.util.get_node_ip_address()
        store = TCPStore(address, 0, size, True, wait_for_workers=False)
        internal_kv._internal_kv_put(key, f"{address} {store.port}", overwrite=True)
        return store
    deadline = Deadline(JOIN_TIMEOUT_S)
    while (found := internal_kv._internal_kv_get(key)) is None:
        if not deadline.left_s():
            raise RendezvousError(f"rank 0 did not start its store in time: there is no {key!r}")
        time.sleep(0.01)
    address, port = found.decode().split()
    return TCPStore(address, int(port), size, False, wait_for_workers=False)
