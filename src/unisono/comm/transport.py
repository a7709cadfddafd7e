"""What a Communicator moves data with. What only some transports support has a default here that
says so; callers check before they use it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from numbers import Real
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
"""How long a call waits for its peers by default."""


def check_seconds(seconds: Any, name: str = "timeout_s") -> float:
    """A limit in seconds, which was passed as `name`; ValueError unless it is a positive number."""
    if not isinstance(seconds, Real) or not float(seconds) > 0:
        raise ValueError(f"{name}={seconds!r} is not a positive number of seconds")
    return float(seconds)


class NoFastPath:
    """For transports without an engine: every call takes the general path."""

    @staticmethod
    def run(*_: Any) -> int:
        return Status.ASK_AGAIN

    all_reduce = submit = isend = irecv = barrier = run_given = run

    @staticmethod
    def send(*_: Any) -> int:
        return -Status.ASK_AGAIN

    recv = send


class Transport(ABC):
    """One member of a group, for its Communicator. A transport never refers to its Communicator:
    a group ends when the program drops its last reference."""

    rank: int
    size: int
    name: str
    global_ranks: tuple[int, ...] | None
    timeout_s: float
    backend: str = "unisono"
    devices: Collection[str] = ("cpu",)
    """The device types whose tensors it takes."""

    is_on_one_host: bool = False
    """Whether its ranks share the memory of one host."""

    has_forms: bool = False
    """Whether it has reductions of other forms: reproducible ones, and wire formats."""
    reproducible: bool = False
    """Whether its reductions are such, unless a call says otherwise."""

    tags: range = range(2**31 - 1)
    """The tags that a message may have."""

    fast_path: Any = NoFastPath
    """The engine's group, whose methods run a call or say that they have not begun it."""
    exceptions: Any = None
    """Makes the exceptions for works of the fast path."""

    # -- what every transport does ---------------------------------------------------------------

    @abstractmethod
    def run(self, call: Call, async_op: bool) -> Work | None:
        """Run a collective, at once or as a work."""

    @abstractmethod
    def barrier(self, timeout_s: float | None, async_op: bool) -> Work | None:
        """Return once every rank has called it, or return a work."""

    @abstractmethod
    def send(self, tensor: Any, peer: int, tag: int) -> None:
        """Return once the receiver has matched it."""

    @abstractmethod
    def recv(self, tensor: Any, peer: int | None, tag: int) -> int:
        """Receive into the tensor; returns the rank that sent it."""

    @abstractmethod
    def isend(self, tensor: Any, peer: int, tag: int) -> Work:
        """As `send`, but return at once."""

    @abstractmethod
    def irecv(self, tensor: Any, peer: int | None, tag: int) -> Work:
        """As `recv`, but return at once."""

    @abstractmethod
    def split(self, members: tuple[int, ...], name: str) -> Transport:
        """A group of these ranks, one of which is ours; all of them call it."""

    @abstractmethod
    def refuse(self, operation: str, why: str) -> None:
        """Tell the peers that this rank will not take part in a call of this name, and why."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """End the group on every rank."""

    @abstractmethod
    def ending(self, doing: str) -> GroupError | None:
        """How the group ended, or None; `doing` is what this rank was doing."""

    @abstractmethod
    def close(self) -> None:
        """Release everything."""

    # -- what some transports do -----------------------------------------------------------------

    def run_fast(self, operation: Operation, output: Any, op: Any) -> int:
        """A blocking call on a GPU tensor with little overhead; ASK_AGAIN: it has not begun."""
        return Status.ASK_AGAIN

    run_schedule: Callable[[Call, str | Schedule, Schedule, bool], Work | None] | None = None
    """An all_reduce or a broadcast by an algorithm whose schedule the engine runs itself."""

    def run_again(
        self, operation: Operation, output: Any, input: Any, root: Any, op: Any, algorithm: Any
    ) -> int:
        """A blocking call by an algorithm that has run before, on plain tensors, with little
        overhead; ASK_AGAIN: it has not begun."""
        return Status.ASK_AGAIN

    def allocate(self, size_bytes: int) -> Memory | None:
        """Memory that all ranks map, with this many bytes for this rank, or None; all call it."""
        return None

    def find_memory(self, address: int) -> tuple[Memory, int] | None:
        """The memory that contains an address, and the offset into which rank's part."""
        return None

    def own_parts(self) -> list[tuple[int, int, int]]:
        """The memories in which this rank has tensors: the number by which others find each, the
        address of this rank's part here and its bytes."""
        return []

    def memory(self, number: int) -> Memory | None:
        """The memory of this number, as long as a rank has a tensor there."""
        return None

    membership: Any = None
    """Who its ranks are, in a group of the engine."""
    process_group: Any = None
    """The process group of another library, if it moves the data."""
    exchange_integers: Callable[..., list[tuple[int, ...]]] | None = None
    """Every rank's integers, in rank order, as many from each; perhaps with a limit in seconds."""
    gather_ragged: Callable[..., Gathered] | None = None
    """Every rank's tensor in one call, if all are small."""

    def check_call(self, call: Call) -> None:  # noqa: B027
        """Raise ValueError or TypeError for a call that this transport does not support."""

    def check_message(self, sends: bool, peer: int | None) -> None:  # noqa: B027
        """The same for a message."""

    def refuse_message(self, sends: bool, peer: int | None, tag: int, why: str) -> None:  # noqa: B027
        """Tell the peer that this rank will not send to it or receive from it, and why."""

    def batch(self, tensors: Sequence[Any], begin: Callable[[], list[Work]]) -> list[Work]:
        """Begin many messages of these tensors so that their order does not matter."""
        return begin()

    def decide(self, serial: int, value: int) -> int:
        """The value that the first member proposed under this serial; also in an ended group."""
        raise UnisonoError(f"group {self.name} ({self.backend}) does not support decide")

    def shrink(self, name: str, at_least: int, timeout_s: float, store: Any) -> Transport:
        """A group of this name of the remaining ranks; all of them call it."""
        raise UnisonoError(
            f"group {self.name} ({self.backend}) cannot shrink: only unisono's own groups can"
        )

    def open_store(self) -> Any:
        """A torch Store that only these ranks use; None if they have none."""
        return None

    def leave_out(self, members: tuple[int, ...]) -> None:  # noqa: B027
        """This rank called split for a group of these members, and is not one of them."""

    def loss_among(self, ranks: Sequence[int], doing: str) -> GroupError | None:
        """What to raise because one of these ranks has died, even if not that ended the group."""
        return None

    def call_error(self, status: int, operation: int, op: Any, tensors: Any) -> Exception:
        """The exception for a status of the fast path."""
        raise NotImplementedError

    def message_error(self, status: int, sends: bool, peer: int, tag: int) -> Exception:
        """The same for a message."""
        raise NotImplementedError
