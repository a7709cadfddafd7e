"""How a trainer and the workers of inference engines meet at an address and a port.

Rank 0, the trainer, hosts a store there. Every rank publishes its arguments and compares them with
the others' before anything is connected: workers get their rank and the group's size by remote
calls, and if these contradict each other, all ranks raise at once.
"""

from __future__ import annotations

import contextlib
import json
import time
from functools import partial

from unisono.comm.communicator import Communicator
from unisono.comm.meeting.board import Board, StoreGone
from unisono.comm.meeting.deadline import Deadline, in_seconds, meeting_timeout_s
from unisono.comm.meeting.roster import Entry, Roster
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
    See also `WeightUpdateGroup`.

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
        board = Board(store, deadline)
        _Meeting(board, name, rank, world_size, where, backend).gather()
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
    _board_of(Board(store), name).compare_set("failure", "", failure)


def _board_of(board: Board, name: str) -> Board:
    return board.part(f"unisono/weights/{name}")


class _Meeting:
    """One rank's side of comparing all ranks' arguments, through the store."""

    def __init__(
        self, board: Board, name: str, rank: int, size: int, where: str, backend: str
    ) -> None:
        self._board, self._where = _board_of(board, name), where
        self._roster = Roster(self._board, name, rank, size, {"backend": backend})
        self._seen: dict[int, Entry] = {}

    def gather(self) -> None:
        """Return once all have arrived. Raises RendezvousError, the same on all that have, if their
        arguments do not fit together."""
        try:
            self._announce()
            while self._find_missing():
                self._roster.wait(self._find_missing)
        except StoreGone as error:
            raise self._failure(str(error)) from error
        except RendezvousError as error:
            self._tell(str(error))
            raise
        except UnisonoError as error:
            self._tell(f"rank {self._roster.rank}: {error}")
            raise

    def _announce(self) -> None:
        rank, size, mine = self._roster.rank, self._roster.size, self._roster.mine
        if size < 2:
            raise self._failure(
                f"rank {rank} was given world_size={size}: there must be at least 2, "
                "the trainer and a worker"
            )
        if not 0 <= rank < size:
            raise self._failure(
                f"rank {rank} is not below world_size={size}: a worker's rank is "
                "rank_offset plus its number in its engine; world_size counts all workers and "
                "the trainer"
            )
        if mine["backend"] not in ("auto", "unisono"):
            check_backend(mine["backend"])
        other = self._roster.claim()
        if other is not None:
            raise self._failure(
                f"rank {rank} is process {other['pid']} on {other['machine']} already, and "
                f"process {mine['pid']} on {mine['machine']} claims the same rank: is rank_offset "
                "right, and was the group of an earlier run closed?"
            )

    def _find_missing(self) -> list[int]:
        """The ranks that have not arrived. Raises RendezvousError if another one's arguments
        differ, or if it has failed, or at the deadline."""
        missing = [rank for rank in range(self._roster.size) if not self._has_come(rank)]
        if failure := self._board.get("failure"):
            raise RendezvousError(json.loads(failure)["why"])
        if missing and not self._board.deadline.left_s():
            limit = in_seconds(self._board.deadline.timeout_s)
            raise self._failure(f"{name_ranks(missing)} did not join within {limit}")
        return missing

    def _has_come(self, rank: int) -> bool:
        theirs = self._seen.get(rank) or self._roster.look_up(rank)
        if theirs is None:
            return False
        own, mine = self._roster.rank, self._roster.mine
        self._seen[rank] = theirs
        if theirs["size"] != mine["size"]:
            raise self._failure(
                f"rank {own} was given world_size={mine['size']}, rank {rank} "
                f"world_size={theirs['size']}: all ranks need the same, the trainer plus all "
                "workers"
            )
        if theirs["backend"] != mine["backend"]:
            raise self._failure(
                f"rank {own} was given backend {mine['backend']}, rank {rank} {theirs['backend']}"
            )
        return True

    def _failure(self, why: str) -> RendezvousError:
        return RendezvousError(f"{self._where} could not be made: {why}")

    def _tell(self, text: str) -> None:
        """Leave the first failure for the others. The store stays until all expected ranks have
        read it."""
        ranks = max([self._roster.size, *(theirs["size"] for theirs in self._seen.values())])
        failure = json.dumps({"why": text, "ranks": ranks})
        with contextlib.suppress(RuntimeError):
            first = json.loads(self._board.compare_set("failure", "", failure))
            left = self._board.add("left")
            stay_s = max(_FAREWELL_S, min(_LATECOMERS_S, self._board.deadline.left_s()))
            farewell = Deadline(stay_s if self._roster.rank == 0 else 0)
            while left < max(ranks, first["ranks"]) and farewell.left_s():
                time.sleep(0.01)
                left = self._board.add("left", 0)
