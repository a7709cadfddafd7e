"""The Communicator: the one thing that moves data, whatever lies beneath.

Methods are output-first and work in place, as torch's do. A tensor is a CPU `torch.Tensor` or a
`numpy.ndarray`, contiguous or not. `root`, and every rank in an argument, is a rank of this group.

Where a collective has a *wide* side (one part for each rank), that side is either one tensor,
cut evenly along its elements, or a list of `size` tensors, one per rank, which may differ in size
and may be empty. Where every argument is a list of tensors (`all_reduce([a, b])`,
`all_gather([wide_a, wide_b], [a, b])`), the call is *coalesced*: all of them travel together.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias

from unisono.errors import GroupError

if TYPE_CHECKING:
    import numpy
    import torch

    from unisono.plan.schedule import Schedule

Tensor: TypeAlias = "torch.Tensor | numpy.ndarray[Any, Any]"
Tensors: TypeAlias = "Tensor | Sequence[Tensor]"

DEFAULT_TIMEOUT_S = 1800.0
"""How long a call waits for its peers unless told otherwise."""


@dataclass(frozen=True)
class PremulSum:
    """The reduction sum(factor * x); the factor must be the same on every rank."""

    factor: float


Op: TypeAlias = "str | PremulSum"

REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")
"""The names of the reductions; `PremulSum(factor)` is the ninth, "mean" a synonym of "avg"."""


REDUCTION_NAMES = (*REDUCTIONS, "premul_sum", "avg")
"""By the engine's number. The last is TRUNCATED_AVG, which errors call an average."""

TRUNCATED_AVG = "truncated_avg"
"""For the torch backend, on the engine alone: "avg", and of integers the sum divided, towards
zero, as NCCL has it. Everywhere else whoever averages integers must say what to do with
fractions."""


def has_meaning(op: str, dtype: str) -> bool:
    """Whether a reduction means something for a dtype, both by name: csrc/reduce.c's rule."""
    if dtype.startswith(("float8", "float4")) or dtype in ("complex32", "float128", "longdouble"):
        return False
    if dtype == "bool":
        return op not in ("avg", "mean", "premul_sum", TRUNCATED_AVG)
    if "int" in dtype:
        return op not in ("avg", "mean")
    if dtype.startswith("complex"):
        return op in ("sum", "avg", "mean", "product", "premul_sum", TRUNCATED_AVG)
    return op not in ("band", "bor", "bxor")


def holds(dtype: str, factor: float) -> bool:
    """Whether a factor can scale numbers of this dtype: integers need a whole one of 64 bits."""
    return "int" not in dtype or (float(factor).is_integer() and -(2**63) <= factor < 2**63)


def count(tensor: Any) -> int:
    """How many elements a tensor or array has."""
    return int(tensor.numel() if hasattr(tensor, "numel") else tensor.size)


def dtype_name(tensor: Any) -> str:
    """The dtype of a tensor or array by name, the same for torch and NumPy."""
    return name_of_dtype(getattr(tensor, "dtype", "no dtype"))


@lru_cache(maxsize=256)
def name_of_dtype(dtype: Any) -> str:
    """A dtype by name; remembered, since lists of tensors ask for many and torch is slow here."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Message:
    """One of a batch: `kind` is "send" or "recv", `peer` the rank at the other end."""

    kind: Literal["send", "recv"]
    tensor: Any
    peer: int
    tag: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("send", "recv"):
            raise ValueError(f'a Message is a "send" or a "recv", not {self.kind!r}')


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


class Work(ABC):
    """An operation that may not have finished. It keeps its tensors alive until it has.

    Works may be waited for in any order and from any thread, or dropped: they finish anyway.
    """

    __slots__ = ()

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> None:
        """Return once the operation has finished, or raise what went wrong.

        Raises CollectiveTimeout after `timeout_s`; the operation goes on, and may be waited for
        again.
        """

    @abstractmethod
    def is_completed(self) -> bool:
        """Whether it has finished, well or not."""

    @abstractmethod
    def exception(self) -> Exception | None:
        """What went wrong; None if nothing has, or not yet."""

    def source_rank(self) -> int:
        """Who sent the message that this work received."""
        raise ValueError("this work has not received a message")


class Communicator(ABC):
    """A group of ranks and the ways in which they exchange tensors.

    Every member calls the same operations in the same order. All methods raise a `GroupError`
    when that fails, and the group is then poisoned: later calls raise the first cause again.
    An argument that makes no sense raises ValueError or TypeError on every rank that passed it;
    where all members did, the group goes on.

    With `async_op` a method returns a `Work` at once and the operation goes on by itself, after
    those that were begun before it; its tensors must not be touched until it has finished.
    """

    rank: int
    size: int
    global_ranks: tuple[int, ...] | None
    name: str
    timeout_s: float
    backend: str = "unisono"
    """What moves the data: "unisono", or the torch backend of that name."""

    @staticmethod
    def join(
        name: str,
        rank: int,
        size: int,
        store: Any = None,
        *,
        timeout_s: float | None = None,
        join_timeout_s: float | None = None,
    ) -> Communicator:
        """Meet processes of this machine that were started separately, by a name, and make a group.

        Every rank passes the same name, which no other job of this user has at that time, or a
        torch Store that all can reach. Whoever comes first waits, and says after 5 s for whom
        (logger `unisono`, a warning); a process that ends while it waits may start again. When a
        member of the group ends, the others' calls raise PeerLost: they close the group, call
        `join` again, and meet whoever takes its place. `global_ranks` is None: the members have no
        world in common.

        `timeout_s` is how long each call waits for the others, 30 minutes unless it is given.
        `join_timeout_s` is how long the meeting may take: unless it is given, `timeout_s` where
        that is given, else 300 s.

        Raises RendezvousError if the others do not come, or come with another size; if another
        process is joining as this rank; if they run on another machine or as another user.
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
    def all_reduce(
        self,
        tensor: Tensors,
        op: Op = "sum",
        *,
        async_op: bool = False,
        algorithm: str | Schedule | None = None,
    ) -> Work | None:
        """Combine `tensor` over all ranks; every rank has the result, bit for bit the same. The
        tensors of a list must not share memory.

        `algorithm` names one of `unisono.plan.catalog("all_reduce")`, or is a Schedule; None is
        what UNISONO_ALGO names, and if it names nothing the implementation's own. It must be the
        same on all ranks. A schedule adds in its own order: docs/execution.md.
        """

    @abstractmethod
    def reduce(
        self, tensor: Tensors, root: int = 0, op: Op = "sum", *, async_op: bool = False
    ) -> Work | None:
        """Combine `tensor` over all ranks; `root` has the result, the others' stay untouched."""

    @abstractmethod
    def broadcast(self, tensor: Tensors, root: int = 0, *, async_op: bool = False) -> Work | None:
        """Copy `root`'s tensor to every rank."""

    @abstractmethod
    def all_gather(self, output: Tensors, input: Tensors, *, async_op: bool = False) -> Work | None:
        """Every rank has all inputs, in rank order, in its wide `output`."""

    @abstractmethod
    def reduce_scatter(
        self, output: Tensors, input: Tensors, op: Op = "sum", *, async_op: bool = False
    ) -> Work | None:
        """Combine the wide inputs over all ranks; rank r has part r of the result in `output`."""

    @abstractmethod
    def gather(
        self, output: Tensors | None, input: Tensor, root: int = 0, *, async_op: bool = False
    ) -> Work | None:
        """`root` has all inputs, in rank order, in its wide `output`; others pass None."""

    @abstractmethod
    def scatter(
        self, output: Tensor, input: Tensors | None, root: int = 0, *, async_op: bool = False
    ) -> Work | None:
        """Rank r has part r of `root`'s wide `input` in `output`; others pass None as input."""

    @abstractmethod
    def all_to_all(self, output: Tensors, input: Tensors, *, async_op: bool = False) -> Work | None:
        """Part j of rank i's wide `input` is part i of rank j's wide `output`."""

    @abstractmethod
    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        """Send `tensor` to rank `dst`; returns once a receiver has matched it, at every size."""

    @abstractmethod
    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> int:
        """Receive into `tensor` from rank `src`, or from anybody; returns who sent it."""

    @abstractmethod
    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Work:
        """As `send`, but go on at once."""

    @abstractmethod
    def irecv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> Work:
        """As `recv`, but go on at once; the work's `source_rank()` says who sent it."""

    def batch_isend_irecv(self, messages: Sequence[Message]) -> list[Work]:
        """Start many messages together. No order among them can make them block each other."""
        return [
            self.isend(message.tensor, message.peer, message.tag)
            if message.kind == "send"
            else self.irecv(message.tensor, message.peer, message.tag)
            for message in check_messages(messages)
        ]

    @abstractmethod
    def barrier(self, *, timeout_s: float | None = None, async_op: bool = False) -> Work | None:
        """Return once every rank has called it. `timeout_s` is this call's own limit."""

    @abstractmethod
    def split(self, ranks: Sequence[int], label: str = "") -> Communicator | None:
        """Make a group of these members, numbered in the order given.

        Only members take part; a rank that is not in `ranks` gets None at once and need not call.
        Groups of the same members are told apart by the order in which they are made, or by a
        `label`, which is part of the group's name: differently labelled ones never mix.
        """

    def _members(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """The members of a new group; ValueError unless they are ranks of this one."""
        members = tuple(ranks)
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

    @abstractmethod
    def refuse(self, operation: str, why: str) -> NoReturn:
        """Raise ValueError about this rank's arguments of a collective, once its peers know that
        it will not take part."""

    @abstractmethod
    def abort(self, reason: str = "") -> None:
        """End the group, from any rank or thread: every member's calls, under way or later,
        raise `GroupAborted` with the reason."""

    @property
    @abstractmethod
    def errored(self) -> GroupError | None:
        """Why the group ended: what its calls raise from now on; None while all is well."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Closing twice does nothing."""

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} rank {self.rank} of {self.size}>"
