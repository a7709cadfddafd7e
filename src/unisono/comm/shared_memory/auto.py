"""`algorithm="auto"`: the algorithm that `unisono tune` found fastest, where it may be taken.

Every rank comes to the same choice: it depends on the table, which the members compared when they
met, and on what a call must have alike on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unisono.comm.arguments import LISTS
from unisono.comm.base import Op, dtype_name
from unisono.comm.tuning import Tuning

_ROUNDED_ON_THE_WAY = ("float16", "bfloat16")
"""The engine's own way adds these in float32 and rounds once."""
_WITHOUT_ARITHMETIC = ("broadcast", "all_gather", "all_to_all")


class AutoChoice:
    """Chooses for one group. `ranks` is its size."""

    def __init__(self, tuning: Tuning, ranks: int) -> None:
        self._tuning = tuning
        self._ranks = ranks
        self._in_order: dict[str, bool] = {}

    def choose(
        self, collective: str, tensor: Any, op: Op = "sum", reorder: bool = False
    ) -> str | None:
        """The algorithm for a call with this tensor, or this wide side; None: the engine's own."""
        is_list = isinstance(tensor, LISTS)
        if is_list and collective != "all_reduce":
            return None  # of parts that may differ in size, from rank to rank too
        tensors: Sequence[Any] = tensor if is_list else [tensor]
        if not all(_is_plain(tensor) for tensor in tensors):
            return None
        size_bytes = sum(tensor.nbytes for tensor in tensors)
        found = self._tuning.find_algorithm(collective, size_bytes, reorder)
        if found is None or not self._is_known(collective, found):
            return None
        if reorder or collective in _WITHOUT_ARITHMETIC:
            return found
        if collective != "all_reduce" or not self._keeps_order(found):
            return None
        halves = any(dtype_name(tensor) in _ROUNDED_ON_THE_WAY for tensor in tensors)
        if halves and (self._ranks > 2 or op not in ("sum", "product", "min", "max")):
            return None
        return found

    def _is_known(self, collective: str, algorithm: str) -> bool:
        """Whether it can be run: a table may name what this version does not have."""
        from unisono.comm.compiled_schedules import schedule_for

        try:
            schedule_for(collective, algorithm, self._ranks)
        except ValueError:
            return False
        return True

    def _keeps_order(self, algorithm: str) -> bool:
        """Looked at here again, whatever the table says: bits are promised, not looked up."""
        known = self._in_order.get(algorithm)
        if known is None:
            from unisono.comm.compiled_schedules import schedule_for
            from unisono.plan.order import keeps_rank_order

            schedule = schedule_for("all_reduce", algorithm, self._ranks)
            known = self._in_order[algorithm] = keeps_rank_order(schedule)
        return known


def _is_plain(tensor: Any) -> bool:
    """A tensor or an array in the CPU's memory."""
    device = getattr(tensor, "device", "cpu")
    return hasattr(tensor, "nbytes") and str(device) == "cpu"
