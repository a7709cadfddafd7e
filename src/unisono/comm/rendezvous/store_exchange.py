"""What every rank tells all others through a torch Store."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from unisono.comm.rendezvous.announcements import store_answers
from unisono.comm.rendezvous.unix_socket import Deadline
from unisono.comm.rendezvous.waiting import Waiting, in_seconds
from unisono.errors import RendezvousError
from unisono.wording import name_ranks


def exchange(
    store: Any,
    name: str,
    rank: int,
    ranks: Sequence[int],
    text: str,
    deadline: Deadline,
    check: Callable[[], None] = lambda: None,
) -> list[str]:
    """The texts of these ranks, in their order; each of them calls this, and has it once all have
    come.

    Exchanges under one name are numbered, so that a store may serve several, one after the other.
    Raises RendezvousError, with who is missing, at the deadline; and what `check` raises.
    """
    size = len(ranks)
    waiting = Waiting(rank, size, "world", deadline)
    with store_answers():
        serial = store.add(f"unisono/{name}/count/{rank}", 1)
        keys = {member: f"unisono/{name}/{serial}/{member}" for member in ranks}
        store.set(keys[rank], text)
        pause_s = 0.001
        while not store.check(list(keys.values())):
            is_late = not deadline.left_s()
            if is_late or waiting.is_long():
                missing = [member for member, key in keys.items() if not store.check([key])]
                if is_late and missing:
                    raise RendezvousError(
                        f"{name_ranks(missing)} of {size} did not come within "
                        f"{in_seconds(deadline.timeout_s)}"
                    )
                waiting.say(missing, size - len(missing))
            check()
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.05)
        return [text.decode() for text in store.multi_get(list(keys.values()))]
