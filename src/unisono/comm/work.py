"""Handles of operations that are over already, or that are several."""

from __future__ import annotations

from collections.abc import Iterable

from unisono.comm.base import Work


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


def join_works(works: Iterable[Work | None]) -> Work | None:
    """The works of one call as one; None where the call was carried out at once."""
    begun = list(works)
    asynchronous = [work for work in begun if work is not None]
    if not asynchronous:
        return None
    return asynchronous[0] if len(asynchronous) == 1 else JoinedWork(asynchronous)
