"""Facts from every rank to global rank 0, through a store and never through the program's groups.

Every rank appends batches of facts to a log of its own; rank 0 reads the logs, and gathers the
facts that have the same topic.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

_PAUSE_S, _READ_S = 0.02, 0.2
_MOST_OPEN = 20_000
"""Topics for which ranks are missing; the oldest is dropped."""
_logger = logging.getLogger("unisono")

Facts = dict[int, Any]
"""By global rank."""
Compare = Callable[[str, Facts], object]


class Exchange:
    """`compare` is called on rank 0, in its thread, with a topic and the facts of all its members,
    in the order in which topics become complete."""

    def __init__(self, store: Any, rank: int, size: int, compare: Compare) -> None:
        self._keeps_server_alive = store
        self._store = store.clone()
        self._rank, self._size, self._compare = rank, size, compare
        self._mine: queue.SimpleQueue[tuple[str, Sequence[int], Any]] = queue.SimpleQueue()
        self._written = 0
        self._read = [0] * size
        self._open: dict[str, Facts] = {}
        self._ended: dict[int, bool] = {}
        self._stop = threading.Event()
        self._broken = False
        self._thread = threading.Thread(target=self._run, name="unisono sanitizer", daemon=True)
        self._thread.start()

    def tell(self, topic: str, members: Sequence[int], fact: Any) -> None:
        """This rank's fact; `fact` must be JSON, lists and not tuples. All members tell one."""
        self._mine.put((topic, [*members], fact))

    def abandon(self) -> None:
        """Tell nothing more, and ask for no outcome."""
        self._stop.set()
        self._thread.join(1.0)

    def finish(self, has_proof: Callable[[], bool], wait_s: float) -> bool:
        """Write what is left; returns whether any rank has a proof. Waits for the other ranks, but
        for no more than `wait_s`."""
        end = time.monotonic() + wait_s
        self._stop.set()
        self._thread.join(max(wait_s, 1.0))
        found = has_proof()
        if self._broken or self._thread.is_alive():
            return found
        with contextlib.suppress(Exception):  # the store may be gone: its host has ended
            self._write()
            self._store.set(f"end/{self._rank}", str(int(found)))
            if self._rank:
                while not self._store.check(["outcome"]):
                    if time.monotonic() > end:
                        return found
                    time.sleep(_PAUSE_S)
                return bool(self._store.get("outcome") == b"1")
            while len(self._ended) < self._size and time.monotonic() < end:
                for rank in range(self._size):
                    if rank not in self._ended and self._store.check([f"end/{rank}"]):
                        self._ended[rank] = self._store.get(f"end/{rank}") == b"1"
                self._gather()
                if len(self._ended) < self._size:
                    time.sleep(_PAUSE_S)
            self._gather()
            found = has_proof() or any(self._ended.values())
            self._store.set("outcome", str(int(found)))
            if self._size > 1:  # rank 0 may host the store: the others read the outcome
                time.sleep(min(_READ_S, max(0.0, end - time.monotonic())))
        return found

    def _run(self) -> None:
        try:
            while not self._stop.wait(_PAUSE_S):
                self._write()
                self._gather()
        except Exception:
            self._broken = True
            _logger.debug("unisono.watch: the sanitizer's store has failed", exc_info=True)

    def _write(self) -> None:
        batch = []
        with contextlib.suppress(queue.Empty):
            while True:
                batch.append(self._mine.get_nowait())
        if not batch:
            return
        if self._rank == 0:
            for topic, members, fact in batch:
                self._add(0, topic, members, json.loads(json.dumps(fact)))
            return
        self._store.set(f"log/{self._rank}/{self._written}", json.dumps(batch))
        self._written += 1

    def _gather(self) -> None:
        if self._rank:
            return
        for rank in range(1, self._size):
            while self._store.check([key := f"log/{rank}/{self._read[rank]}"]):
                batch = json.loads(self._store.get(key))
                self._store.delete_key(key)
                self._read[rank] += 1
                for topic, members, fact in batch:
                    self._add(rank, topic, members, fact)

    def _add(self, rank: int, topic: str, members: Sequence[int], fact: Any) -> None:
        facts = self._open.setdefault(topic, {})
        facts[rank] = fact
        if len(facts) >= len(members):
            del self._open[topic]
            try:
                self._compare(topic, dict(sorted(facts.items())))
            except Exception:  # the program goes on
                _logger.debug("unisono.watch: facts could not be compared", exc_info=True)
        elif len(self._open) > _MOST_OPEN:
            del self._open[next(iter(self._open))]
