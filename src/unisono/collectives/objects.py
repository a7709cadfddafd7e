"""Objects between ranks: plain data in our own encoding (encoding.py), so that a peer can only send
data; anything else is pickled, and only on request."""

from __future__ import annotations

from typing import Any, TypeVar

from unisono.collectives.arguments import check_rank, inputs_first
from unisono.collectives.encoding import decode, encode
from unisono.collectives.ragged import (
    all_gather_integers,
    bytes_of,
    device_of,
    gather_rows,
    tensor_from_bytes,
)
from unisono.comm.communicator import Communicator, Group
from unisono.errors import name_ranks
from unisono.world.world import resolve, well_formed

Object = TypeVar("Object")

_FINE, _WRONG_TYPE, _WRONG_VALUE = range(3)


@well_formed
def broadcast_object(
    obj: Any, src: int = 0, group: Group = None, *, allow_pickle: bool = False
) -> Any:
    """Rank `src`'s `obj`, on every rank; what the others pass is ignored.

    Plain data travels without pickle, all else only with `allow_pickle`, which is the same on every
    rank of `group` (None: the world); a peer can then run code here.

    Raises TypeError on every rank, with the path, where it is not plain data, and ValueError on
    every rank where some allow pickle and some do not.
    Cost: an all_gather of three integers and a broadcast of the encoded object. See also
    `broadcast`, `all_gather_object`.

    >>> unisono.broadcast_object({"lr": 0.1} if comm.rank == 0 else None)
    {'lr': 0.1}
    """
    comm = resolve(group)
    check_rank(comm, "broadcast", src)
    data, lengths = _encode_all(comm, obj, allow_pickle, comm.rank == src)
    if comm.size == 1:
        return decode(data, allow_pickle)
    payload = data if comm.rank == src else bytearray(lengths[src])
    received = tensor_from_bytes(payload, device_of(comm))
    comm.broadcast(received, src)
    return obj if comm.rank == src else decode(bytes_of(received), allow_pickle)


@inputs_first
def all_gather_object(
    obj: Object, group: Group = None, *, allow_pickle: bool = False
) -> list[Object]:
    """Return a list of every rank's `obj`, in rank order, on every rank of `group` (None: the
    world). `allow_pickle`, the same on every rank, allows objects that are not plain data. Raises
    TypeError on every rank, with the path, for one that is not, where it is not allowed.
    Cost: an all_gather of three integers and one of the encoded objects. See also `gather_object`,
    `all_gather`.

    >>> unisono.all_gather_object(f"rank {comm.rank}")
    ['rank 0', 'rank 1']
    """
    return _gather(resolve(group), obj, None, allow_pickle) or []


@inputs_first
def gather_object(
    obj: Object, dst: int = 0, group: Group = None, *, allow_pickle: bool = False
) -> list[Object] | None:
    """Return a list of every rank's `obj`, in rank order, on rank `dst` of `group` (None: the
    world), and None elsewhere. `allow_pickle`, the same on every rank, allows objects that are not
    plain data. Raises TypeError on every rank, with the path, for one that is not, where it is not
    allowed, and ValueError if `dst` is not a rank of the group.
    Cost: an all_gather of three integers and a gather of the encoded objects. See also
    `all_gather_object`, `gather`.

    >>> texts = unisono.gather_object(("text", comm.rank), dst=0)
    >>> texts == ([("text", 0), ("text", 1)] if comm.rank == 0 else None)
    True
    """
    comm = resolve(group)
    check_rank(comm, "gather", dst)
    return _gather(comm, obj, dst, allow_pickle)


def _gather(comm: Communicator, obj: Any, dst: int | None, allow_pickle: bool) -> list[Any] | None:
    data, lengths = _encode_all(comm, obj, allow_pickle)
    device, rows = device_of(comm), None
    if dst is None or comm.rank == dst:
        rows = [tensor_from_bytes(bytearray(length), device) for length in lengths]
    gather_rows(comm, rows, tensor_from_bytes(data, device), dst)
    return None if rows is None else [decode(bytes_of(row), allow_pickle) for row in rows]


def _encode_all(
    comm: Communicator, obj: Any, allow_pickle: bool, has_part: bool = True
) -> tuple[bytearray, list[int]]:
    """This rank's bytes, and how many bytes each rank has. If one rank fails, all raise."""
    data, state = bytearray(), _FINE
    if has_part:
        try:
            data = encode(obj, allow_pickle)
        except (TypeError, ValueError) as error:
            data = bytearray(str(error).encode("utf-8", "replace"))
            state = _WRONG_TYPE if isinstance(error, TypeError) else _WRONG_VALUE
    device = device_of(comm)
    everyone = all_gather_integers(comm, (state, int(allow_pickle), len(data)), device)
    states, allowing, lengths = zip(*everyone, strict=True)
    if any(state != _FINE for state in states):
        rank = next(rank for rank, state in enumerate(states) if state != _FINE)
        text = data if rank == comm.rank else bytearray(lengths[rank])
        complaint = tensor_from_bytes(text, device)
        comm.broadcast(complaint, rank)
        kind = TypeError if states[rank] == _WRONG_TYPE else ValueError
        why = bytes(bytes_of(complaint)).decode("utf-8", "replace")
        raise kind(f"the object of rank {rank} (group {comm.name}) cannot be sent: {why}")
    if len(set(allowing)) > 1:
        ranks = [rank for rank, allows in enumerate(allowing) if allows]
        raise ValueError(
            f"only {name_ranks(ranks)} of group {comm.name} passed allow_pickle=True: pass it on "
            "every rank or on none"
        )
    return data, list(lengths)
