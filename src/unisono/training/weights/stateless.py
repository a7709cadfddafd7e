"""A communicator with the interface of vLLM's PyNcclCommunicator.

TRL, OpenRLHF, verl and vLLM meet in a `StatelessProcessGroup`, a store with a rank and a size, and
broadcast from the trainer's rank, whichever it is: both sides make the same call.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from unisono.comm.communicator import Communicator
from unisono.comm.meeting.board import Board
from unisono.comm.meeting.deadline import meeting_timeout_s
from unisono.comm.over_torch.stores import store_at
from unisono.comm.transport import DEFAULT_TIMEOUT_S


class StatelessCommunicator:
    """A replacement for vLLM's `PyNcclCommunicator(group, device)` where weights are broadcast. It
    also takes CPU tensors, and several ranks on one GPU.

    `group` is anything with `rank`, `world_size` and `store`, such as vLLM's
    `StatelessProcessGroup`: every rank of it makes one. Tensors may be on any device, so `device`
    is only stored, and `library_path` is ignored. A call with `stream` runs on that CUDA stream.
    `timeout_s` is how long each call waits for the others, 30 minutes by default, and
    `join_timeout_s` how long this one waits.

    When a rank dies, the others' calls raise PeerLost at once; no call waits forever.

    Raises TypeError for a `group` without these attributes, and what `Communicator.join` raises.
    Cost: that of the same calls of a Communicator. See also `stateless_init_process_group`.

    >>> from types import SimpleNamespace
    >>> store = torch.distributed.TCPStore("127.0.0.1", port, 2, comm.rank == 0)
    >>> group = SimpleNamespace(rank=comm.rank, world_size=2, store=store)
    >>> communicator = unisono.training.StatelessCommunicator(group, device="cpu")
    >>> weight = torch.full((2,), comm.rank)
    >>> communicator.broadcast(weight, src=1)  # on both sides
    >>> communicator.group.barrier()
    >>> weight
    tensor([1, 1])
    >>> communicator.destroy()
    """

    def __init__(
        self,
        group: Any,
        device: int | str | torch.device = "cpu",
        library_path: str | None = None,
        *,
        timeout_s: float | None = None,
        join_timeout_s: float | None = None,
    ) -> None:
        for name in ("rank", "world_size", "store"):
            if not hasattr(group, name):
                raise TypeError(
                    f"{type(group).__name__} has no {name!r}: it is not a stateless group"
                )
        self.rank: int = group.rank
        self.world_size: int = group.world_size
        self.device = torch.device("cuda", device) if isinstance(device, int) else device
        self.available, self.disabled = True, False
        name = name_in(group.store, self.rank)
        self._comm = Communicator.join(
            name,
            self.rank,
            self.world_size,
            group.store,
            timeout_s=timeout_s,
            join_timeout_s=join_timeout_s,
        )
        self.group = _GroupWithBarrier(group, self._comm)
        """The given group, with our own barrier, which detects dead ranks."""

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        """Copy the `tensor` of rank `src` to every rank, on `stream`. Every rank calls it.

        Raises CollectiveMismatch if sizes or dtypes differ, PeerLost if a rank has died.

        >>> one = unisono.training.stateless_init_process_group("127.0.0.1", port, comm.rank, 2)
        >>> x = torch.full((2,), comm.rank)
        >>> one.broadcast(x, src=1)
        >>> x
        tensor([1, 1])
        """
        with _on(stream):
            self._comm.broadcast(tensor.detach(), src)

    def destroy(self) -> None:
        """Leave the group and release its store. Dropping the last reference does the same.

        >>> one = unisono.training.stateless_init_process_group("127.0.0.1", port, comm.rank, 2)
        >>> one.destroy()
        """
        self.available, self.disabled = False, True
        self._comm.close()
        self.group.let_go()


def stateless_init_process_group(
    master_address: str,
    master_port: int | str,
    rank: int,
    world_size: int,
    device: int | str | torch.device = "cpu",
    *,
    timeout_s: float | None = None,
    join_timeout_s: float | None = None,
) -> StatelessCommunicator:
    """A `StatelessCommunicator` of the `world_size` ranks that meet in a store, which `rank` 0
    hosts at `master_address` and `master_port`. It has the name and arguments of the function in
    vLLM, OpenRLHF and verl; `device`, `timeout_s` and `join_timeout_s` are those of the class.

    Raises RendezvousError if the others do not arrive in time or the port is taken.

    >>> one = unisono.training.stateless_init_process_group("127.0.0.1", port, comm.rank, 2, "cpu")
    >>> one.rank == comm.rank, one.world_size
    (True, 2)
    """
    limit_s = meeting_timeout_s(timeout_s, join_timeout_s)
    reach = partial(store_at, master_address, str(master_port), rank, world_size, limit_s)
    hosted = reach(group="weights", hosts=True) if rank == 0 else None
    store = reach(group="weights", hosts=False)
    group = SimpleNamespace(rank=rank, world_size=world_size, store=store, hosted=hosted)
    return StatelessCommunicator(
        group, device, timeout_s=timeout_s or DEFAULT_TIMEOUT_S, join_timeout_s=limit_s
    )


class _GroupWithBarrier:
    """The `group` attribute of a communicator: the given group, except for the barrier."""

    def __init__(self, given: Any, comm: Communicator) -> None:
        self._given, self._comm = given, comm

    def barrier(self, timeout: float | None = None) -> None:
        self._comm.barrier(timeout_s=timeout)

    def let_go(self) -> None:
        self._given = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._given, name)


def name_in(store: Any, rank: int) -> str:
    """A name that is the same on all ranks and unique: each rank counts the communicators that it
    makes there."""
    board = Board(store)
    serial = board.add(f"unisono/communicators of rank {rank}")
    chosen = board.compare_set(f"unisono/communicator {serial}", "", uuid.uuid4().hex)
    return f"stateless {chosen}"


@contextlib.contextmanager
def _on(stream: Any) -> Iterator[None]:
    if stream is None:
        yield
    else:
        with torch.cuda.stream(stream):
            yield
