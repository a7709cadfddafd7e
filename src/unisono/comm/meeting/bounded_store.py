"""torch Stores that answer in time, and texts that ranks exchange through one.

torch's own wait forever for a host that is stopped or cut off, and retry one that has ended until
their own timeout.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from unisono.comm.meeting.deadline import Deadline, Waiting, in_seconds
from unisono.errors import RendezvousError


class StoreGone(RendezvousError):
    """The torch Store through which ranks meet has ended, or does not answer."""


def answer_within(limit_s: float, ask: Callable[[], Any]) -> Any:
    """What `ask`, a request to a torch Store, returns or raises. Raises StoreGone if it takes
    longer; it then continues in a thread that cannot be ended."""
    answers: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((ask(), None))
        except Exception as error:
            answers.put((None, error))

    threading.Thread(target=run, name="unisono asks a store", daemon=True).start()
    try:
        answer, error = answers.get(timeout=max(limit_s, 1.0))  # it says which ranks were missing
    except queue.Empty:
        raise StoreGone(
            f"the torch Store of the meeting did not answer within {in_seconds(limit_s)}: "
            "its process is stopped, or the network to it drops packets (a wrong MTU?)"
        ) from None
    if error is not None:
        raise error
    return answer


class BoundedStore:
    """A torch Store whose operations raise StoreGone after `limit_s()` seconds."""

    def __init__(self, store: Any, limit_s: Callable[[], float]) -> None:
        self._store, self._limit_s = store, limit_s

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args: self._ask(lambda: getattr(self._store, name)(*args))

    def _ask(self, ask: Callable[[], Any]) -> Any:
        try:
            return answer_within(self._limit_s(), ask)
        except StoreGone:
            raise
        except RuntimeError as error:  # torch's texts are about sockets
            reason = str(error).partition("\n")[0]
            raise StoreGone(
                "the torch Store of the meeting does not answer; has the process that hosts it "
                f"ended? ({reason})"
            ) from error


def exchange(
    store: Any,
    name: str,
    rank: int,
    ranks: Sequence[int],
    text: str,
    deadline: Deadline,
    check: Callable[[], None] = lambda: None,
    group: str = "world",
) -> list[str]:
    """The texts of these ranks, in order; each of them calls this, and it returns once all have.
    Exchanges under one name are numbered, so that a store may serve several."""
    waiting = Waiting(rank, len(ranks), group, deadline)
    store = BoundedStore(store, deadline.left_s)
    serial = store.add(f"unisono/{name}/count/{rank}", 1)
    keys = {member: f"unisono/{name}/{serial}/{member}" for member in ranks}
    store.set(keys[rank], text)
    while not store.check(list(keys.values())):
        waiting.look(lambda: [member for member, key in keys.items() if not store.check([key])])
        check()
        waiting.pause()
    return [text.decode() for text in store.multi_get(list(keys.values()))]
