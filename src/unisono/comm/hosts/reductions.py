"""One reduction of one dtype over hosts: inside each host, then between them, then the end.

The order is that of ranks inside a host, then of hosts, at every size. Sums of half precision are
taken in float32 and rounded once: partial sums are float32 between hosts, too, unless they shall be
rounded before they cross.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from unisono.comm.base import REDUCTION_NAMES, TRUNCATED_AVG, Op, PremulSum
from unisono.comm.engine import SUM_DIVIDED, combine
from unisono.comm.reductions import ReductionName

_NUMBERS = {name: number for number, name in enumerate(REDUCTION_NAMES[:-1])}
_HALVES = (torch.float16, torch.bfloat16)


class Reduction:
    """`partial` is the dtype of what one host has, `crossing` that in which others get it, `inside`
    what its ranks reduce by."""

    def __init__(self, op: Op, dtype: torch.dtype, ranks: int, rounds: bool = False) -> None:
        name = "premul_sum" if isinstance(op, PremulSum) else "avg" if op == "mean" else op
        averages = name in ("avg", TRUNCATED_AVG)
        self.dtype = dtype
        self.partial = torch.float32 if dtype in _HALVES and name not in ("min", "max") else dtype
        self.crossing = dtype if rounds else self.partial
        self.inside = cast(ReductionName | PremulSum, "sum" if averages else op)
        self._inside_number = _NUMBERS["sum" if averages else name]
        self._factor = float(op.factor) if isinstance(op, PremulSum) else 1.0
        self._between_number = _NUMBERS["sum" if averages or name == "premul_sum" else name]
        self._divisor = float(ranks) if averages else None

    def widen(self, row: torch.Tensor) -> torch.Tensor:
        """A rank's row as its host reduces it."""
        return row.to(self.partial)

    def narrow(self, partial: torch.Tensor) -> torch.Tensor:
        """What a host has, as it crosses to others. A host's own takes the same way, so that the
        result does not depend on who computes it."""
        return partial.to(self.crossing)

    def combine_ranks(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """What a host has of its ranks' rows, which are as they were given."""
        wide = rows if self.partial is self.dtype else [self.widen(row) for row in rows]
        result = torch.empty_like(wide[0])
        if result.numel():
            combine(result, wide, self._inside_number, self._factor)
        return result

    def combine_all(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """The result, from what all ranks have, in their order."""
        return self.combine_hosts([self.combine_ranks(rows)])

    def combine_hosts(self, partials: Sequence[torch.Tensor]) -> torch.Tensor:
        """The result, from what each host has."""
        partials = [self.widen(partial) for partial in partials]
        result = torch.empty_like(partials[0])
        if result.numel():
            if self._divisor is None:
                combine(result, partials, self._between_number)
            else:
                combine(result, partials, SUM_DIVIDED, self._divisor)
        return result if self.partial is self.dtype else result.to(self.dtype)
