"""The handles of operations that go on by themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeAlias

from unisono.comm.base import Work
from unisono.comm.engine import EngineMessage, EngineWork, Status, engine_ns


class NativeWork(Work):
    """A submitted call of the engine; `blame` makes an exception of its status."""

    def __init__(self, work: EngineWork, blame: Callable[[int], Exception]) -> None:
        self._work = work
        self._blame = blame

    def wait(self, timeout_s: float | None = None) -> None:
        status = self._work.wait(-1 if timeout_s is None else engine_ns(max(0.0, timeout_s)))
        if status:
            raise self._blame(status)

    def is_completed(self) -> bool:
        return self._work.done()

    def exception(self) -> Exception | None:
        status = self._work.wait(0) if self._work.done() else Status.OK
        return self._blame(status) if status else None


MessageFacts: TypeAlias = tuple[bool, Any, int, int]
"""Whether it sends, its tensor, its peer (-1: anybody) and its tag."""


class Seen(Protocol):
    """What knows of a message who sent it, its bytes and its dtype."""

    def seen(self) -> tuple[int, int, int]: ...


class Blamer(Protocol):
    """What makes an exception of a message's status."""

    def message_error(self, status: int, message: Seen, about: MessageFacts) -> Exception: ...


class NativeMessage(Work):
    """A message on its way."""

    __slots__ = ("_about", "_blamer", "_message")

    def __init__(self, message: EngineMessage | int, blamer: Blamer, about: MessageFacts) -> None:
        self._blamer = blamer
        self._about = about
        if isinstance(message, int):
            raise blamer.message_error(message, _Unseen(), about)
        self._message = message

    def wait(self, timeout_s: float | None = None) -> None:
        status = self._message.wait(-1 if timeout_s is None else engine_ns(max(0.0, timeout_s)))
        if status:
            raise self._blamer.message_error(status, self._message, self._about)

    def is_completed(self) -> bool:
        return self._message.done()

    def exception(self) -> Exception | None:
        status = self._message.wait(0) if self._message.done() else Status.OK
        if status:
            return self._blamer.message_error(status, self._message, self._about)
        return None

    def source_rank(self) -> int:
        if not self._message.done():
            raise ValueError("this message has not arrived yet")
        return self._message.seen()[0]


class _Unseen:
    """A message that never began."""

    def seen(self) -> tuple[int, int, int]:
        return -1, 0, 0


class FinishedWork(Work):
    """What was over before anybody could wait for it."""

    def wait(self, timeout_s: float | None = None) -> None:
        return None

    def is_completed(self) -> bool:
        return True

    def exception(self) -> Exception | None:
        return None


class JoinedWork(Work):
    """Several works as one."""

    def __init__(self, works: list[Work]) -> None:
        self._works = works

    def wait(self, timeout_s: float | None = None) -> None:
        for work in self._works:
            work.wait(timeout_s)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def exception(self) -> Exception | None:
        return next((error for work in self._works if (error := work.exception())), None)


def joined(works: Iterable[Work | None]) -> Work | None:
    """The works of one call as one; None where the call was carried out at once."""
    begun = list(works)
    asynchronous = [work for work in begun if work is not None]
    if not asynchronous:
        return None
    return asynchronous[0] if len(asynchronous) == 1 else JoinedWork(asynchronous)
