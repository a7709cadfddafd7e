"""The cases of the parity matrix: a collective, a reduction, a dtype, a layout in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from expected import COMPLEXES, FLOATS, SIGNED, UNSIGNED

ONLY_MOVED = (
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.complex32,
)
DTYPES = (*FLOATS, *SIGNED, *UNSIGNED, torch.bool, *COMPLEXES, *ONLY_MOVED)

OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")

IN_PLACE = ("all_reduce", "reduce", "broadcast")
REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single")
LISTS = ("all_gather", "reduce_scatter", "gather", "scatter", "all_to_all")
MOVING = (
    "broadcast",
    "all_gather",
    "all_gather_single",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_single",
    "send_recv",
)

LAYOUTS = (
    "contiguous",
    "strided",  # base[::2]: its neighbours must not change
    "transposed",
    "mixed",  # contiguous on even ranks, transposed on odd ones
    "expanded",  # as an input; outputs are contiguous
    "empty",
    "one",  # an element in the middle of others
    "odd",  # seven elements from the second on
    "uneven",  # in lists: a size for each rank
)


@dataclass(frozen=True)
class Case:
    """One call on every rank; `op` is empty if nothing is combined."""

    collective: str
    op: str
    dtype: torch.dtype
    layout: str

    def __str__(self) -> str:
        parts = (self.collective, self.op, str(self.dtype).removeprefix("torch."), self.layout)
        return " ".join(filter(None, parts))

    @property
    def has_meaning(self) -> bool:
        """Whether a result is defined; otherwise every rank must raise."""
        if self.layout == "expanded" and self.collective in IN_PLACE:
            return False  # several elements of the result would share one address
        return not self.op or _combines(self.op, self.dtype, self.collective)


def _combines(op: str, dtype: torch.dtype, collective: str) -> bool:
    if dtype in ONLY_MOVED:
        return False
    if dtype in COMPLEXES:
        # torch itself rejects products of complex numbers, but only in all_reduce
        return op in ("SUM", "AVG", "PREMUL_SUM") or (
            op == "PRODUCT" and collective != "all_reduce"
        )
    if dtype is torch.bool:
        return op not in ("AVG", "PREMUL_SUM")
    if dtype in FLOATS:
        return op not in ("BAND", "BOR", "BXOR")
    return True


def cases(collectives: tuple[str, ...] = (*REDUCING, *MOVING)) -> Iterator[Case]:
    """Every case of these collectives, including undefined ones."""
    for collective in collectives:
        layouts = [name for name in LAYOUTS if name != "uneven" or collective in LISTS]
        for op in OPS if collective in REDUCING else ("",):
            for dtype in DTYPES:
                if op and dtype is torch.complex32:
                    continue  # torch passes it to some reductions as pairs of float16
                for layout in layouts:
                    yield Case(collective, op, dtype, layout)
