"""Works, handles of operations that may not have finished; and messages that start together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, Generic, Literal

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # Python's own has defaults since 3.13

    from unisono.comm.tensors import Tensor

    Result_co = TypeVar("Result_co", covariant=True, default=None)
else:
    from typing import TypeVar

    Result_co = TypeVar("Result_co", covariant=True)


class Work(ABC, Generic[Result_co]):
    """An operation that may not have finished. It keeps its tensors alive until it has.

    Works may be waited for in any order and from any thread, or dropped: they finish anyway. To
    type checkers a function returns a `Work[torch.Tensor]`, which is not a tensor; a Communicator's
    method, whose result is in its arguments, a `Work[None]`, or `Work` for short. See also
    `Message`, `all_reduce`.

    >>> x = torch.ones(2)
    >>> work = comm.all_reduce(x, async_op=True)
    >>> isinstance(work, unisono.Work)
    True
    >>> work.wait()
    >>> x
    tensor([2., 2.])
    """

    __slots__ = ()

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> Result_co:
        """Return once the operation has finished: the result that the blocking call would have
        returned, None for a Communicator's method.

        Raises the operation's error, and CollectiveTimeout after `timeout_s`; then, and after an
        exception from a signal handler, the operation continues, and you can wait again.

        >>> work = unisono.all_gather(torch.tensor(comm.rank), async_op=True)
        >>> work.wait(timeout_s=60)
        [tensor(0), tensor(1)]
        """

    @abstractmethod
    def is_completed(self) -> bool:
        """Whether it has finished or failed. This does not wait.

        >>> work = comm.barrier(async_op=True)
        >>> work.wait()
        >>> work.is_completed()
        True
        """

    @abstractmethod
    def exception(self) -> Exception | None:
        """The operation's error; None if there is none, or it has not finished.

        >>> work = comm.barrier(async_op=True)
        >>> work.wait()
        >>> work.exception() is None
        True
        """

    def source_rank(self) -> int:
        """The rank that sent the message that this work received. Raises ValueError if it has not
        received one.

        >>> work = comm.irecv(torch.empty(1))  # from any rank
        >>> comm.send(torch.ones(1), comm.next)
        >>> work.wait()
        >>> work.source_rank() == comm.prev
        True
        """
        raise ValueError("this work has not received a message")


class FinishedWork(Work):
    """An operation that was over at once."""

    def wait(self, timeout_s: float | None = None) -> None:
        return None

    def is_completed(self) -> bool:
        return True

    def exception(self) -> Exception | None:
        return None


class JoinedWork(Work):
    def __init__(self, works: list[Work]) -> None:
        self._works = works

    def wait(self, timeout_s: float | None = None) -> None:
        for work in self._works:
            work.wait(timeout_s)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def exception(self) -> Exception | None:
        return next((error for work in self._works if (error := work.exception())), None)


def join_works(works: Iterable[Work | None]) -> Work | None:
    """The works of one call as one; None if the call ran at once."""
    begun = list(works)
    asynchronous = [work for work in begun if work is not None]
    if not asynchronous:
        return None
    return asynchronous[0] if len(asynchronous) == 1 else JoinedWork(asynchronous)


class Message:
    """One of a batch: `kind` is "send" or "recv", `peer` the rank at the other end, `tensor` what
    is sent or where it goes; a receive takes the first message of that `tag`. See also
    `batch_isend_irecv`.

    >>> unisono.Message("send", torch.ones(1), peer=comm.next)
    Message(kind='send', tensor=tensor([1.]), peer=..., tag=0)
    """

    # No dataclass: making one takes a millisecond at the start of every process.

    def __init__(
        self, kind: Literal["send", "recv"], tensor: Tensor, peer: int, tag: int = 0
    ) -> None:
        if kind not in ("send", "recv"):
            raise ValueError(f'a Message must be a "send" or a "recv", not {kind!r}')
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
        raise TypeError("a batch must be a list of Messages, not a single one")
    checked = list(messages)
    for message in checked:
        if not isinstance(message, Message):
            raise TypeError(
                f"a batch must contain unisono.Message, not {type(message).__name__}: "
                'Message("send", tensor, peer) or Message("recv", tensor, peer), where torch has '
                "P2POp(dist.isend, tensor, peer); here peer is a rank of the group"
            )
    return checked
