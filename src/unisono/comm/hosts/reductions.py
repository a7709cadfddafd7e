"""One reduction of one dtype over hosts: inside each host, then between them, then the end.

The order is that of ranks inside a host, then of hosts, at every size. Sums of half precision are
taken in float32 and rounded once: partial sums are float32 between hosts, too, unless they shall be
rounded before they cross.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.comm.engine import SUM_DIVIDED, combine
from unisono.comm.engine.numbers import REDUCTION_NUMBERS
from unisono.comm.reductions import Reduction

_HALVES = (torch.float16, torch.bfloat16)


class HostsReduction:
    """`partial` is the dtype of what one host has, `crossing` that in which others get it, `inside`
    what its ranks reduce by."""

    def __init__(self, op: Reduction, dtype: torch.dtype, ranks: int, rounds: bool = False) -> None:
        averages = op.name in ("avg", "truncated_avg")
        self.dtype = dtype
        is_half = dtype in _HALVES and op.name not in ("min", "max")
        self.partial = torch.float32 if is_half else dtype
        self.crossing = dtype if rounds else self.partial
        self.inside = Reduction("sum") if averages else op
        sums = averages or op.name == "premul_sum"
        self._between_number = REDUCTION_NUMBERS["sum"] if sums else op.number
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
            combine(result, wide, self.inside.number, self.inside.factor)
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
