"""Objects between ranks: plain data by an encoding of our own, anything else only if asked for.

Plain data is None, bool, int, float, complex, str, bytes, list, tuple, dict, set, torch tensors
and NumPy arrays and scalars, nested as you like. It needs no pickle, so that a peer can send data
and nothing else. With `allow_pickle=True` on every rank the parts that are no plain data are
pickled: a peer can then run any code here.
"""

from __future__ import annotations

from typing import Any

import torch

from unisono.collectives.encoding import decode, encode
from unisono.collectives.integers import all_gather_words, device_of
from unisono.collectives.refusals import check_rank
from unisono.comm.base import Communicator
from unisono.world.world import resolve

_FINE, _WRONG_TYPE, _WRONG_VALUE = range(3)


def broadcast_object(
    obj: Any, src: int = 0, group: Any = None, *, allow_pickle: bool = False
) -> Any:
    """Rank `src`'s object, on every rank; what the others pass is ignored.

    Raises TypeError on every rank, with the path, where it is no plain data, and ValueError on
    every rank where some allow pickle and some do not.
    """
    comm = resolve(group)
    check_rank(comm, "broadcast", src)
    data, lengths = _agree(comm, obj, allow_pickle, comm.rank == src)
    if comm.size == 1:
        return decode(data, allow_pickle)
    received = _bytes(comm, data if comm.rank == src else bytearray(lengths[src]))
    comm.broadcast(received, src)
    return obj if comm.rank == src else decode(_raw(received), allow_pickle)


def all_gather_object(obj: Any, group: Any = None, *, allow_pickle: bool = False) -> list[Any]:
    """A list of every rank's object, in rank order, on every rank. Raises as `broadcast_object`."""
    comm = resolve(group)
    data, lengths = _agree(comm, obj, allow_pickle)
    received = [_bytes(comm, bytearray(length)) for length in lengths]
    comm.all_gather(received, _bytes(comm, data))
    return [decode(_raw(one), allow_pickle) for one in received]


def gather_object(
    obj: Any, dst: int = 0, group: Any = None, *, allow_pickle: bool = False
) -> list[Any] | None:
    """A list of every rank's object, in rank order, on rank `dst`; None elsewhere. Raises as
    `broadcast_object`."""
    comm = resolve(group)
    check_rank(comm, "gather", dst)
    data, lengths = _agree(comm, obj, allow_pickle)
    received = None
    if comm.rank == dst:
        received = [_bytes(comm, bytearray(length)) for length in lengths]
    comm.gather(received, _bytes(comm, data), dst)
    return None if received is None else [decode(_raw(one), allow_pickle) for one in received]


def _agree(
    comm: Communicator, obj: Any, allow_pickle: bool, has_part: bool = True
) -> tuple[bytearray, list[int]]:
    """This rank's bytes, and how many every rank has. Where one cannot go on, nobody does."""
    data, state = bytearray(), _FINE
    if has_part:
        try:
            data = encode(obj, allow_pickle)
        except (TypeError, ValueError) as error:
            data = bytearray(str(error).encode("utf-8", "replace"))
            state = _WRONG_TYPE if isinstance(error, TypeError) else _WRONG_VALUE
    words = all_gather_words(comm, (state, int(allow_pickle), len(data)), device_of(comm))
    states, allowing, lengths = zip(*words, strict=True)
    if any(state != _FINE for state in states):
        rank = next(rank for rank, state in enumerate(states) if state != _FINE)
        complaint = _bytes(comm, data if rank == comm.rank else bytearray(lengths[rank]))
        comm.broadcast(complaint, rank)
        kind = TypeError if states[rank] == _WRONG_TYPE else ValueError
        text = bytes(_raw(complaint)).decode("utf-8", "replace")
        raise kind(f"the object of rank {rank} (group {comm.name}) cannot be sent: {text}")
    if len(set(allowing)) > 1:
        ranks = [rank for rank, allows in enumerate(allowing) if allows]
        raise ValueError(
            f"only ranks {ranks} of group {comm.name} pass allow_pickle=True: pass it on "
            "every rank or on none"
        )
    return data, list(lengths)


def _bytes(comm: Communicator, data: bytearray) -> torch.Tensor:
    device = device_of(comm)
    if not data:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return torch.frombuffer(data, dtype=torch.uint8).to(device)


def _raw(tensor: torch.Tensor) -> memoryview:
    return tensor.cpu().numpy().data
