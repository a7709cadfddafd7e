"""The part of a Communicator that the table of `unisono tune` is for: pieces, and algorithms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from unisono.comm.base import Communicator
from unisono.comm.collective_calls import is_auto
from unisono.comm.engine import TUNED, default_tuning

if TYPE_CHECKING:
    from unisono.comm.engine_types import Group
    from unisono.comm.shared_memory.auto import AutoChoice
    from unisono.comm.tuning import Tuning
    from unisono.plan.schedule import Schedule


class TunedGroup(Communicator):
    """`is_tuned` says whether a table was there when the group was made, the same on all ranks."""

    is_tuned: bool
    _group: Group
    _auto: AutoChoice | None = None

    def _tune_by(self, tuning: Tuning | None) -> None:
        if tuning is not None and tuning.crowded == self._group.is_crowded:
            self._group.tune(*tuning.sizes)
        else:  # it was measured with another number of cores
            tuning = None
        self.is_tuned = tuning is not None
        if tuning is not None:
            from unisono.comm.shared_memory.auto import AutoChoice  # most machines have no table

            self._auto = AutoChoice(tuning, self.size)

    @property
    def tuning(self) -> dict[str, int]:
        """In what pieces calls move, and from how many bytes on they go another way."""
        return dict(zip(TUNED, self._group.tuning, strict=True))

    @property
    def default_tuning(self) -> dict[str, int]:
        """What `tuning` is where there is no table."""
        return dict(zip(TUNED, default_tuning(self.size, self.is_crowded), strict=True))

    @property
    def is_crowded(self) -> bool:
        """Whether the group has more ranks than cores."""
        return self._group.is_crowded

    def tune(self, sizes: Mapping[str, int]) -> None:
        """Change numbers of `tuning`. Every rank does so, alike, between the same two calls.

        Raises ValueError for one that is out of bounds.
        """
        self._group.tune(*(self.tuning | dict(sizes)).values())

    def _choose(
        self, algorithm: str | Schedule | None, collective: str, wide: Any, async_op: bool
    ) -> str | Schedule | None:
        """The algorithm of a collective other than all_reduce: what runs over messages cannot go
        on by itself."""
        if not is_auto(algorithm):
            return algorithm
        if async_op:
            return None
        return self._choose_by_table(collective, wide)

    def _choose_by_table(self, collective: str, tensor: Any, op: Any = "sum") -> str | None:
        if self._auto is None:
            return None
        return self._auto.choose(collective, tensor, op, self.allow_reorder)
