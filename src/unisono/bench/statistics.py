"""What a row of samples says: median, percentiles, spread, and how sure the median is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy

_TWO_SIDED_95 = 1.96


@dataclass(frozen=True)
class Summary:
    """Samples in a few numbers, all in the samples' own unit."""

    p50: float
    p25: float
    p75: float
    p95: float
    p99: float
    min: float
    max: float
    mean: float
    low: float
    high: float
    """The median's 95% confidence interval is [low, high], whatever the distribution."""

    @property
    def spread(self) -> float:
        """Half of the samples lie in a range of this width around the median, relative to it."""
        return (self.p75 - self.p25) / self.p50 if self.p50 else 0.0

    @property
    def uncertainty(self) -> float:
        """Half the width of the median's confidence interval, relative to the median."""
        return (self.high - self.low) / 2 / self.p50 if self.p50 else 0.0


def summarise(samples: Sequence[float] | Any) -> Summary:
    """The summary of at least one sample."""
    ordered = numpy.sort(numpy.asarray(samples, dtype=numpy.float64))
    count = len(ordered)
    if count == 0:
        raise ValueError("a summary needs at least one sample")
    p25, p50, p75, p95, p99 = (
        float(value) for value in numpy.percentile(ordered, (25, 50, 75, 95, 99))
    )
    # The number of samples below the median is binomial: these two order statistics enclose it.
    reach = _TWO_SIDED_95 * math.sqrt(count) / 2
    low = max(0, math.floor(count / 2 - reach) - 1)
    high = min(count - 1, math.ceil(count / 2 + reach))
    return Summary(
        p50=p50,
        p25=p25,
        p75=p75,
        p95=p95,
        p99=p99,
        min=float(ordered[0]),
        max=float(ordered[-1]),
        mean=float(ordered.mean()),
        low=float(ordered[low]),
        high=float(ordered[high]),
    )


def geometric_mean(values: Sequence[float]) -> float:
    """The mean for ratios."""
    return math.exp(sum(math.log(value) for value in values) / len(values))
