"""How a trainer and the workers of inference engines meet at an address and a port.

Rank 0, the trainer, hosts a store there. Every rank publishes its arguments and compares them with
the others' before anything is connected: workers get their rank and the group's size by remote
calls, and if these contradict each other, all ranks raise at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from unisono.comm.communicator import Communicator
from unisono.comm.meeting.bounded_store import BoundedStore, StoreGone
from unisono.comm.meeting.deadline import Deadline, Waiting, in_seconds, meeting_timeout_s
from unisono.comm.over_torch.stateless import check_backend, connect_stateless
from unisono.comm.over_torch.stores import store_at
from unisono.comm.transport import DEFAULT_TIMEOUT_S
from unisono.errors import RendezvousError, UnisonoError, name_ranks
from unisono.training.weights.by_parameter import WeightUpdateGroup

BACKENDS = ("auto", "unisono", "gloo", "nccl")
_FAREWELL_S = 1.0
_LATECOMERS_S = 10.0
"""How long the host of the store stays after a failure so that the others can read it; longer for
ranks that may still arrive."""


@dataclass(frozen=True)
class _Member:
    """A rank's arguments, and where it runs."""

    size: int
    backend: str
    machine: str
    pid: int


def init_weight_update_group(
    master_address: str,
    master_port: int | str,
    rank_offset: int,
    world_size: int,
    group_name: str = "weights",
    backend: str = "auto",
    *,
    worker_rank: int = 0,
    timeout_s: float | None = None,
    join_timeout_s: float | None = None,
) -> WeightUpdateGroup:
    """Connect the trainer and all workers of all engines in a group.

    The trainer is rank 0 (`rank_offset=0`) and hosts a store at `master_address` and `master_port`
    until the group is closed. A worker is rank `rank_offset` + `worker_rank`, its number in its
    engine. `world_size` counts the trainer and all workers. Several groups may meet at one port
    under different names: `group_name` is this one's.

    `backend` is "unisono" (shared memory inside a host), "gloo", "nccl" (CUDA tensors, a GPU for
    each rank), or "auto", which is unisono. The group is independent of torch.distributed.

    `timeout_s` is how long each call waits for the others, 30 minutes by default; `join_timeout_s`
    how long this call does: by default `timeout_s` if given, else 300 s.

    Raises RendezvousError if ranks do not arrive in time, if their sizes or backends differ, or if
    the port is taken; UnisonoError if the backend is not available; ValueError for other arguments.

    >>> group = unisono.training.init_weight_update_group("127.0.0.1", port, comm.rank, 2)
    >>> group.size, group.comm.backend
    (2, 'unisono')
    >>> group.close()
    """
    for what, number in {"rank_offset": rank_offset, "worker_rank": worker_rank}.items():
        if not isinstance(number, int) or number < 0:
            raise ValueError(f"{what} must be a whole number of at least 0, not {number!r}")
    if not isinstance(world_size, int):
        raise ValueError(f"world_size must be a whole number, not {world_size!r}")
    if backend not in BACKENDS:
        raise ValueError(
            f"{backend!r} is not a backend for weights: choose from {', '.join(BACKENDS)}"
        )
    for what, text in {"master_address": master_address, "group_name": group_name}.items():
        if not isinstance(text, str) or not text:
            raise ValueError(f"{what} must be a non-empty string, not {text!r}")
    rank, name = rank_offset + worker_rank, group_name
    deadline = Deadline(meeting_timeout_s(timeout_s, join_timeout_s))
    reach = partial(store_at, master_address, str(master_port), rank, world_size, group=name)
    # The group has its own connection: the port is free once the store itself is released, even if
    # something, such as an exception's frames, still holds the group.
    hosted = reach(deadline.timeout_s, hosts=True) if rank == 0 else None
    try:
        store = reach(deadline.left_s(), hosts=False)
        where = f"the weight update group {name!r} at {master_address}:{master_port}"
        bounded = BoundedStore(store, deadline.left_s)
        _Meeting(bounded, name, rank, world_size, where).gather(backend, deadline)
        limit_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
        left_s = max(deadline.left_s(), 1.0)
        comm: Communicator
        if backend in ("auto", "unisono"):
            comm = Communicator.join(
                name, rank, world_size, store, timeout_s=limit_s, join_timeout_s=left_s
            )
        else:
            limits_s = limit_s, left_s
            comm = Communicator(
                connect_stateless(backend, store, name, rank, world_size, *limits_s)
            )
        return WeightUpdateGroup(comm, hosted)
    except BaseException:
        del hosted
        raise


def end_meeting(address: str, port: int | str, name: str, why: str) -> None:
    """Make all ranks that wait for the group `name` raise RendezvousError: one will not arrive."""
    store = store_at(address, str(port), 0, 1, _FAREWELL_S, group=name, hosts=False)
    failure = json.dumps({"why": f"the group {name!r} could not be made: {why}", "ranks": 1})
    store.compare_set(f"{_keys_of(name)}/failure", "", failure)


def _keys_of(name: str) -> str:
    return f"unisono/weights/{name}"


class _Meeting:
    """One rank's side of comparing all ranks' arguments, through the store."""

    def __init__(self, store: Any, name: str, rank: int, size: int, where: str) -> None:
        self._store, self._keys = store, _keys_of(name)
        self._rank, self._size, self._name, self._where = rank, size, name, where
        self._members: dict[int, _Member] = {}

    def gather(self, backend: str, deadline: Deadline) -> None:
        """Return once all have arrived. Raises RendezvousError, the same on all that have, if their
        arguments do not fit together."""
        try:
            self._announce(backend)
            self._wait_for_others(deadline)
        except StoreGone as error:
            raise self._failure(str(error)) from error
        except RendezvousError as error:
            self._tell(str(error), deadline)
            raise
        except UnisonoError as error:
            self._tell(f"rank {self._rank}: {error}", deadline)
            raise

    def _announce(self, backend: str) -> None:
        if self._size < 2:
            raise self._failure(
                f"rank {self._rank} was given world_size={self._size}: there must be at least 2, "
                "the trainer and a worker"
            )
        if not 0 <= self._rank < self._size:
            raise self._failure(
                f"rank {self._rank} is not below world_size={self._size}: a worker's rank is "
                "rank_offset plus its number in its engine; world_size counts all workers and "
                "the trainer"
            )
        if backend not in ("auto", "unisono"):
            check_backend(backend)
        mine = _Member(self._size, backend, socket.gethostname(), os.getpid())
        text = json.dumps(asdict(mine))
        found = self._store.compare_set(f"{self._keys}/{self._rank}", "", text).decode()
        if found != text:
            other = json.loads(found)
            raise self._failure(
                f"rank {self._rank} is process {other['pid']} on {other['machine']} already, and "
                f"process {mine.pid} on {mine.machine} claims the same rank: is rank_offset "
                "right, and was the group of an earlier run closed?"
            )
        self._members[self._rank] = mine

    def _wait_for_others(self, deadline: Deadline) -> None:
        waiting = Waiting(self._rank, self._size, self._name, deadline)
        while True:
            missing = [rank for rank in range(self._size) if not self._look_up(rank)]
            if self._store.check([f"{self._keys}/failure"]):
                raise RendezvousError(json.loads(self._store.get(f"{self._keys}/failure"))["why"])
            if not missing:
                return
            if not deadline.left_s():
                raise self._failure(
                    f"{name_ranks(missing)} did not join within {in_seconds(deadline.timeout_s)}"
                )
            if waiting.is_long():
                waiting.say(missing, self._size - len(missing))
            waiting.pause()

    def _look_up(self, rank: int) -> bool:
        """Whether a rank has arrived. Raises RendezvousError if its arguments differ."""
        if rank in self._members:
            return True
        if not self._store.check([f"{self._keys}/{rank}"]):
            return False
        theirs = _Member(**json.loads(self._store.get(f"{self._keys}/{rank}")))
        mine = self._members[self._rank]
        self._members[rank] = theirs
        if theirs.size != mine.size:
            raise self._failure(
                f"rank {self._rank} was given world_size={mine.size}, rank {rank} "
                f"world_size={theirs.size}: all ranks need the same, the trainer plus all workers"
            )
        if theirs.backend != mine.backend:
            raise self._failure(
                f"rank {self._rank} was given backend {mine.backend}, rank {rank} {theirs.backend}"
            )
        return True

    def _failure(self, why: str) -> RendezvousError:
        return RendezvousError(f"{self._where} could not be made: {why}")

    def _tell(self, text: str, deadline: Deadline) -> None:
        """Leave the first failure for the others. The store stays until all expected ranks have
        read it."""
        ranks = max([self._size, *(member.size for member in self._members.values())])
        failure = json.dumps({"why": text, "ranks": ranks})
        with contextlib.suppress(RuntimeError):
            first = json.loads(self._store.compare_set(f"{self._keys}/failure", "", failure))
            left = self._store.add(f"{self._keys}/left", 1)
            stay_s = max(_FAREWELL_S, min(_LATECOMERS_S, deadline.left_s()))
            farewell = Deadline(stay_s if self._rank == 0 else 0)
            while left < max(ranks, first["ranks"]) and farewell.left_s():
                time.sleep(0.01)
                left = self._store.add(f"{self._keys}/left", 0)
