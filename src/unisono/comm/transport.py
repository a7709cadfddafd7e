"""What a Communicator moves data with. What only some transports can do has a default here that
says so; callers ask before they use it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from unisono.comm.engine.numbers import Operation, Status
from unisono.comm.work import Work
from unisono.errors import GroupError, UnisonoError

if TYPE_CHECKING:
    from unisono.comm.arguments import Call
    from unisono.comm.engine.group_types import Gathered
    from unisono.comm.shared_tensors import Memory
    from unisono.plan.schedule import Schedule

DEFAULT_TIMEOUT_S = 1800.0
"""How long a call waits for its peers unless told otherwise."""


class NoShortWay:
    """Stands in where a transport has no engine: every call takes the general way."""

    @staticmethod
    def run(*_: Any) -> int:
        return Status.ASK_AGAIN

    all_reduce = submit = isend = irecv = barrier = run_given = run

    @staticmethod
    def send(*_: Any) -> int:
        return -Status.ASK_AGAIN

    recv = send


class Transport(ABC):
    """One member of a group, for its Communicator. A transport never refers to that: a group ends
    when the program drops its last reference."""

    rank: int
    size: int
    name: str
    global_ranks: tuple[int, ...] | None
    timeout_s: float
    backend: str = "unisono"
    devices: Collection[str] = ("cpu",)
    """The kinds of devices whose tensors it takes."""

    is_on_one_host: bool = False
    """Whether its ranks share the memory of one host."""

    tags: range = range(2**31 - 1)
    """The tags that a message may have."""

    short: Any = NoShortWay
    """The engine's group, whose methods carry out a call or say that they have not begun it."""
    exceptions: Any = None
    """By what the works of the short way raise."""

    # -- what every transport does ---------------------------------------------------------------

    @abstractmethod
    def run(self, call: Call, async_op: bool) -> Work | None:
        """Carry out a collective, at once or as a work."""

    @abstractmethod
    def barrier(self, timeout_s: float | None, async_op: bool) -> Work | None:
        """Return once every rank has called it, or with a work."""

    @abstractmethod
    def send(self, tensor: Any, peer: int, tag: int) -> None:
        """Return once the receiver has matched it."""

    @abstractmethod
    def recv(self, tensor: Any, peer: int | None, tag: int) -> int:
        """Who sent what is in the tensor now."""

    @abstractmethod
    def isend(self, tensor: Any, peer: int, tag: int) -> Work:
        """As `send`, but go on at once."""

    @abstractmethod
    def irecv(self, tensor: Any, peer: int | None, tag: int) -> Work:
        """As `recv`, but go on at once."""

    @abstractmethod
    def split(self, members: tuple[int, ...], name: str) -> Transport:
        """A group of these ranks, one of which is ours; all of them call."""

    @abstractmethod
    def refuse(self, operation: str) -> None:
        """Tell the peers that this rank will not take part in a call of this name."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """End the group on every rank."""

    @abstractmethod
    def ending(self, doing: str) -> GroupError | None:
        """How the group ended, or None; `doing` is what this rank was about."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back."""

    # -- what some can do ------------------------------------------------------------------------

    def run_short(self, operation: Operation, output: Any, op: Any) -> int:
        """A blocking call on a GPU's tensor with little around it; ASK_AGAIN: it has not begun."""
        return Status.ASK_AGAIN

    run_schedule: Callable[[Call, Schedule, bool], Work | None] | None = None
    """An all_reduce by a schedule that the engine carries out itself."""

    def allocate(self, size_bytes: int) -> Memory | None:
        """Memory in which this rank has so many bytes and which all ranks see, if any; all call."""
        return None

    def find_memory(self, address: int) -> tuple[Memory, int] | None:
        """The memory in which an address lies, and how far into whose part."""
        return None

    def own_parts(self) -> list[tuple[int, int, int]]:
        """The memories in which this rank has tensors: the number by which others find each, and
        where this rank's part begins here and how many bytes it has."""
        return []

    def memory(self, number: int) -> Memory | None:
        """The memory of this number, for as long as a rank has a tensor there."""
        return None

    process_group: Any = None
    """The process group of another library's, where it moves the data."""
    exchange_integers: Callable[[tuple[int, ...]], list[tuple[int, ...]]] | None = None
    """Every rank's integers, in rank order; all ranks pass equally many."""
    gather_ragged: Callable[..., Gathered] | None = None
    """Every rank's tensor in one call, where all are small."""

    def check_call(self, call: Call) -> None:  # noqa: B027
        """Raise ValueError or TypeError for a call that only this transport cannot carry out."""

    def check_message(self, sends: bool, peer: int | None) -> None:  # noqa: B027
        """The same for a message."""

    def batch(self, tensors: Sequence[Any], begin: Callable[[], list[Work]]) -> list[Work]:
        """Begin many messages of these tensors so that no order among them matters."""
        return begin()

    def decide(self, serial: int, value: int) -> int:
        """What the first of all members proposed under this serial; in an ended group, too."""
        raise UnisonoError(f"group {self.name} ({self.backend}) keeps no decisions")

    def shrink(self, name: str, at_least: int, timeout_s: float, store: Any) -> Transport:
        """A group of this name of those ranks that are left; all of them call."""
        raise UnisonoError(
            f"group {self.name} ({self.backend}) cannot shrink: only unisono's own groups can"
        )

    def grow(
        self,
        name: str,
        meeting: tuple[str, Any],
        count: int,
        limit_s: float,
        generation: int,
    ) -> Transport:
        """A group of this name of all ranks and so many new processes; all ranks call."""
        raise UnisonoError(
            f"group {self.name} ({self.backend}) cannot grow so: unisono's groups can, on several "
            "hosts by a TCPStore that new processes have, too: grow(store=)"
        )

    def open_store(self) -> Any:
        """A torch Store that all ranks reach and nobody else uses; None where they have none."""
        return None

    def leave_out(self, members: tuple[int, ...]) -> None:  # noqa: B027
        """This rank was asked to make a group of these, and is not one of them."""

    def loss_among(self, ranks: Sequence[int], doing: str) -> GroupError | None:
        """What to raise because one of these ranks has died, whatever else has ended the group."""
        return None

    def call_error(self, status: int, operation: int, op: Any, tensors: Any) -> Exception:
        """What a status of the short way stands for."""
        raise NotImplementedError

    def message_error(self, status: int, sends: bool, peer: int, tag: int) -> Exception:
        """The same for a message."""
        raise NotImplementedError
