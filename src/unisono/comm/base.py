"""The Communicator: the one thing that moves data, whatever lies beneath.

Its collectives are in collective_calls.py. The names that stand in signatures beside it are here,
too: whoever speaks to a Communicator needs no other module.
"""

from __future__ import annotations

import importlib
import operator
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, TypeAlias

from unisono.comm.collective_calls import Algorithm, Collectives, No, Yes
from unisono.comm.reductions import (
    REDUCTION_NAMES,
    REDUCTIONS,
    TRUNCATED_AVG,
    AnyOp,
    AnyReduction,
    Op,
    PremulSum,
    Reduction,
    ReductionName,
    has_meaning,
    holds,
)
from unisono.comm.shared_tensors import SharedTensors
from unisono.comm.tensors import Tensor, Tensors, count, dtype_name, name_of_dtype
from unisono.comm.work import Work
from unisono.errors import GroupError, UnisonoError
from unisono.torch_habits import ON_COMMUNICATOR, Absent

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed does not declare it
    from torch.distributed import ProcessGroup

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "REDUCTIONS",
    "REDUCTION_NAMES",
    "TRUNCATED_AVG",
    "Algorithm",
    "AnyOp",
    "AnyReduction",
    "Communicator",
    "Group",
    "Message",
    "No",
    "Op",
    "PremulSum",
    "Reduction",
    "ReductionName",
    "Tensor",
    "Tensors",
    "Work",
    "Yes",
    "check_messages",
    "count",
    "dtype_name",
    "has_meaning",
    "holds",
    "name_of_dtype",
]

DEFAULT_TIMEOUT_S = 1800.0
"""How long a call waits for its peers unless told otherwise."""

Group: TypeAlias = "Communicator | ProcessGroup | int | None"
"""What `group=` takes. torch's new_group returns a number to whoever is not in the group; it is
refused when it is used."""


class Message:
    """One of a batch: `kind` is "send" or "recv", `peer` the rank at the other end, `tensor` what
    is sent or where it goes; a receive takes the first message of that `tag`.

    >>> unisono.Message("send", torch.ones(1), peer=comm.next)
    Message(kind='send', tensor=tensor([1.]), peer=..., tag=0)
    """

    # By hand: to make a dataclass takes a millisecond, and every process pays it as it starts.

    def __init__(
        self, kind: Literal["send", "recv"], tensor: Tensor, peer: int, tag: int = 0
    ) -> None:
        if kind not in ("send", "recv"):
            raise ValueError(f'a Message is a "send" or a "recv", not {kind!r}')
        self.kind: Final = kind
        self.tensor: Final = tensor
        self.peer: Final = peer
        self.tag: Final = tag

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"Message({fields})"


def check_messages(messages: Any) -> list[Message]:
    """The messages of a batch. Raises TypeError before any of them has begun."""
    if isinstance(messages, Message):
        raise TypeError("a batch is a list of Messages, not one")
    checked = list(messages)
    for message in checked:
        if not isinstance(message, Message):
            raise TypeError(
                f"a batch is made of unisono.Message, not of {type(message).__name__}: "
                'Message("send", tensor, peer) or Message("recv", tensor, peer), where torch has '
                "P2POp(dist.isend, tensor, peer); here peer is a rank of the group"
            )
    return checked


class Communicator(Collectives, SharedTensors):
    """A group of ranks and the ways in which they exchange tensors.

    `rank` is this process in the group, `size` the number of ranks, `global_ranks` who they are in
    the world (None where they have none in common), `name` what errors and records call the group,
    `timeout_s` how long a call waits for its peers, `backend` what moves the data.

    Every member calls the same operations in the same order. All methods raise a `GroupError` when
    that fails, and the group is then poisoned: later calls raise the first cause again. An argument
    that makes no sense raises ValueError or TypeError on every rank that passed it; where all
    members did, the group goes on.

    With `async_op` a method returns a `Work` at once and the operation goes on by itself, after
    those that were begun before it; its tensors must not be touched until it has finished.

    >>> comm.size, comm.global_ranks, comm.name, comm.backend
    (2, (0, 1), 'world', 'unisono')
    >>> comm.next == comm.prev == 1 - comm.rank
    True
    >>> comm.errored is None
    True
    """

    rank: int = -1  # every group has its own; dir(Communicator) shows what has a value
    size: int = 0
    global_ranks: tuple[int, ...] | None = None
    name: str = ""
    timeout_s: float = DEFAULT_TIMEOUT_S
    backend: str = "unisono"
    """What moves the data: "unisono", or the torch backend of that name."""

    @staticmethod
    def join(
        name: str,
        rank: int,
        size: int,
        store: Store | None = None,
        *,
        timeout_s: float | None = None,
        join_timeout_s: float | None = None,
    ) -> Communicator:
        """Meet processes that were started separately, by a name, and make a group of `size` ranks,
        in which this process is `rank`.

        Every rank passes the same `name`, which no other job of this user has at that time. Ranks
        on several hosts also pass a torch Store that all can reach, a TCPStore or part of one, as
        `store`; on one host any Store will do, or none. Whoever comes first waits, and says after
        5 s for whom (logger `unisono`, a warning); a process that ends while it waits may start
        again. When a member of the group ends, the others' calls raise PeerLost: they close the
        group, call `join` again, and meet whoever takes its place. `global_ranks` is None: the
        members have no world in common.

        `timeout_s` is how long each call waits for the others, 30 minutes unless it is given.
        `join_timeout_s` is how long the meeting may take: unless it is given, `timeout_s` where
        that is given, else 300 s.

        Raises RendezvousError if the others do not come, or come with another size; if another
        process is joining as this rank; without a store, if they run on another machine or as
        another user.

        >>> import os
        >>> name = unisono.broadcast_object(f"example-{os.getpid()}")
        >>> with unisono.Communicator.join(name, rank=comm.rank, size=2) as pair:
        ...     pair.barrier()
        """
        # By name, since what makes groups imports this interface, and not the other way round.
        maker = importlib.import_module("unisono.comm.join")
        made: Communicator = maker.join(name, rank, size, store, timeout_s, join_timeout_s)
        return made

    @property
    def next(self) -> int:
        """The rank after ours, in a ring: after the last one comes rank 0."""
        return (self.rank + 1) % self.size

    @property
    def prev(self) -> int:
        """The rank before ours, in a ring: before rank 0 comes the last one."""
        return (self.rank - 1) % self.size

    @abstractmethod
    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        """Send `tensor` to rank `dst` with a `tag`; returns once a receiver has matched it, at
        every size.

        Raises MessageMismatch if the receiver wants another dtype or size, DeadlockError where
        ranks wait for each other in a circle, ValueError if `dst` is not a rank of the group.

        >>> if comm.rank == 0:
        ...     comm.send(torch.ones(2), dst=1)
        ... else:
        ...     sender = comm.recv(torch.empty(2), src=0)
        """

    @abstractmethod
    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> int:
        """Receive into `tensor` from rank `src`, or from anybody, the first message with that
        `tag`; returns who sent it.

        Raises MessageMismatch if the message has another dtype or size, DeadlockError where ranks
        wait for each other in a circle, ValueError if `src` is not a rank of the group.

        >>> work = comm.isend(torch.ones(2), comm.next)
        >>> x = torch.empty(2)
        >>> comm.recv(x) == comm.prev
        True
        >>> work.wait()
        """

    @abstractmethod
    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Work:
        """As `send` of `tensor` to `dst` with a `tag`, but go on at once. Raises ValueError if
        `dst` is not a rank of the group; what goes wrong later, the work's `wait()` raises.

        >>> work = comm.isend(torch.ones(2), comm.next)
        >>> comm.recv(torch.empty(2)) == comm.prev
        True
        >>> work.wait()
        """

    @abstractmethod
    def irecv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> Work:
        """As `recv` into `tensor` from `src` with a `tag`, but go on at once; the work's
        `source_rank()` says who sent it. Raises ValueError if `src` is not a rank of the group;
        what goes wrong later, the work's `wait()` raises.

        >>> x = torch.empty(2)
        >>> work = comm.irecv(x, src=comm.prev)
        >>> comm.send(torch.ones(2), dst=comm.next)
        >>> work.wait()
        >>> x
        tensor([1., 1.])
        """

    def batch_isend_irecv(self, messages: Sequence[Message]) -> list[Work]:
        """Start many `messages` together, with a work for each. No order among them can make them
        block each other. Raises ValueError for a message to or from what is not a rank of the
        group.

        >>> x = torch.empty(1)
        >>> send = unisono.Message("send", torch.ones(1), comm.next)
        >>> for work in comm.batch_isend_irecv([send, unisono.Message("recv", x, comm.prev)]):
        ...     work.wait()
        >>> x
        tensor([1.])
        """
        return [
            self.isend(message.tensor, message.peer, message.tag)
            if message.kind == "send"
            else self.irecv(message.tensor, message.peer, message.tag)
            for message in check_messages(messages)
        ]

    @abstractmethod
    def split(self, ranks: Sequence[int], label: str = "") -> Communicator | None:
        """Make a group of these members, `ranks` of this group, numbered in the order given.

        Only members take part; a rank that is not in `ranks` gets None at once and need not call.
        Groups of the same members are told apart by the order in which they are made, or by a
        `label`, which is part of the group's name: differently labelled ones never mix.

        Raises ValueError for ranks that are not in this group, or twice in the new one; PeerLost,
        with its rank in this group, as soon as a member has died; RendezvousError if one does not
        come in time. On one host, survivors can still split a group that a death has ended.

        >>> turned = comm.split([1, 0], label="turned")
        >>> turned.rank == 1 - comm.rank
        True
        >>> comm.split([0]) is None or comm.rank == 0
        True
        """

    def _members(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """The members of a new group; ValueError unless they are ranks of this one."""
        try:
            members = tuple(map(operator.index, ranks))
        except TypeError:
            raise TypeError(
                f"split takes the ranks of the new group, not {ranks!r}: comm.split([0, 1]), or "
                'comm.split([0, 1], label="tp"); ProcessGroupManager makes groups along axes'
            ) from None
        if not members or len(set(members)) != len(members):
            raise ValueError(f"ranks of a group must be different and at least one: {members}")
        if min(members) < 0 or max(members) >= self.size:
            known = self.global_ranks
            hint = ""
            if known and set(members) <= set(known):
                meant = [known.index(member) for member in members]
                hint = f": they are global ranks, and {meant} within this group"
            raise ValueError(f"ranks {members} do not all lie in a group of {self.size}{hint}")
        return members

    def _name_split(self, members: tuple[int, ...], label: str) -> str:
        """What a new group of these members is called: on all of them alike, and each time anew."""
        splits: Counter[tuple[tuple[int, ...], str]] = self.__dict__.setdefault(
            "_splits", Counter()
        )
        splits[members, label] += 1
        serial = f"/{splits[members, label]}" if splits[members, label] > 1 else ""
        dot = "." if label else ""
        return f"{self.name}{dot}{label}[{','.join(map(str, members))}]{serial}"

    @abstractmethod
    def refuse(self, operation: str, why: str) -> NoReturn:
        """Raise ValueError about this rank's arguments of a collective, the `operation`, once its
        peers know that it will not take part: `why` is what the exception says.

        Raises ValueError always. If all ranks refuse the same call, the group goes on; otherwise
        the others raise CollectiveMismatch.

        >>> comm.refuse("all_reduce", "three is too many")
        Traceback (most recent call last):
            ...
        ValueError: ...three is too many...
        """

    @abstractmethod
    def abort(self, reason: str = "") -> None:
        """End the group, from any rank or thread: every member's calls, under way or later, raise
        `GroupAborted` with the `reason`. Raises nothing.

        >>> pair = comm.split([0, 1])
        >>> pair.abort("the loss is NaN")
        >>> pair.barrier()
        Traceback (most recent call last):
            ...
        unisono.errors.GroupAborted: ...the loss is NaN...
        """

    def _decide(self, serial: int, value: int) -> int:
        """The value that the first of all members proposed under this serial, the same on every
        rank. It waits for nobody, and works in a group that has ended, too: what a rank decided
        outlives it. Every decision of a group has a serial above those before it, from 1; values
        are from 0, and both below 2**32. Raises StoreGone where decisions are kept in a torch Store
        that does not answer.
        """
        raise UnisonoError(f"group {self.name} ({self.backend}) keeps no decisions")

    @property
    @abstractmethod
    def errored(self) -> GroupError | None:
        """Why the group ended: what its calls raise from now on; None while all is well."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back, once works and messages that every member has begun have finished.
        Others are cancelled after 1 s: their `wait` says which ranks never came. Closing twice does
        nothing; calls raise GroupClosed from now on, and peers that still need this rank PeerLost.

        >>> pair = comm.split([0, 1])
        >>> pair.close()
        """

    def __init_subclass__(cls) -> None:
        for name in ON_COMMUNICATOR:
            setattr(cls, name, Absent(name))

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in ON_COMMUNICATOR]

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} rank {self.rank} of {self.size}>"
