"""Memory of other processes in this one: opened once, closed when its owner or its group has gone,
and nobody holds it.

A handle may be open once in a process, whatever the number of groups that use it: so the mappings
of all groups are in one place. An allocation is known by its owner and its number, which the driver
never gives out twice: memory that was freed and comes back at the same address is another one.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter

from unisono.comm.cuda.driver import Driver, DriverError
from unisono.comm.cuda.regions import Region


class Mappings:
    """What this process has open. An owner is a token that no other process has."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._bases: dict[tuple[str, int], int] = {}
        self._groups: Counter[str] = Counter()
        self._held: Counter[tuple[str, int]] = Counter()
        self._gone: set[tuple[str, int]] = set()  # which groups do not need, but somebody holds
        self._lock = threading.RLock()  # whoever lets go may be found by the garbage collector

    def __len__(self) -> int:
        return len(self._bases)

    def enter(self, owner: str) -> None:
        """One more group has this process as a member."""
        with self._lock:
            self._groups[owner] += 1

    def leave(self, owner: str) -> None:
        """One group less has; with the last one its memory is closed."""
        with self._lock:
            self._groups[owner] -= 1
            if self._groups[owner] > 0:
                return
            del self._groups[owner]
            for key in [key for key in self._bases if key[0] == owner]:
                self._close(key)

    def address_of(self, owner: str, region: Region) -> int:
        """Where a region of another process lies here. Raises DriverError where the driver does
        not open it."""
        key = owner, region.number
        with self._lock:
            self._gone.discard(key)
            base = self._bases.get(key)
            if base is None:
                base = self._bases[key] = self._driver.open_memory(region.handle)
        return base + region.address - region.base

    def find(self, owner: str, region: Region) -> int | None:
        """Where a region lies here; None: it is not open."""
        base = self._bases.get((owner, region.number))
        return None if base is None else base + region.address - region.base

    def hold(self, owner: str, region: Region) -> int:
        """The same, of memory that stays open until it is let go as often as it was held, whatever
        becomes of its owner."""
        key = owner, region.number
        with self._lock:
            self._held[key] += 1
            try:
                return self.address_of(owner, region)
            except DriverError:
                del self._held[key]  # what is not open, nobody else holds
                raise

    def let_go(self, owner: str, number: int) -> None:
        """Hold an allocation once less; the last one closes it, unless a group may use it."""
        key = owner, number
        with self._lock:
            self._held[key] -= 1
            if self._held[key] > 0:
                return
            del self._held[key]
            if key in self._gone or not self._groups[owner]:
                self._close(key)

    def forget(self, owner: str, number: int) -> None:
        """An allocation has gone: close it, unless it is held."""
        with self._lock:
            if (owner, number) in self._bases:
                self._close((owner, number))

    def _close(self, key: tuple[str, int]) -> None:
        if self._held[key]:
            self._gone.add(key)
            return
        self._gone.discard(key)
        base = self._bases.pop(key)
        with contextlib.suppress(DriverError):  # the GPU may have failed, or this process ends
            self._driver.close_memory(base)
