"""The results of a run: statistics, rows, and the run as JSON (docs/bench.md)."""

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, Self

import numpy

from unisono.errors import UnisonoError
from unisono.plan.predict import mean_absolute_error

SCHEMA = "unisono-bench/1"
DISTURBED_SHARE = 0.4
"""A row is disturbed if other programs affected this share of its samples."""
TOLERANCE = 1.25
"""A model is never trusted beyond this factor."""
AGREEING = 0.2
"""Samples agree if half of them are in a range of this width, relative to the median."""


_TWO_SIDED_95 = 1.96


@dataclass(frozen=True)
class SampleSummary:
    """Samples in a few numbers, in the samples' own unit."""

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
        """Half of the samples are in a range of this width around the median, relative to it."""
        return (self.p75 - self.p25) / self.p50 if self.p50 else 0.0

    @property
    def uncertainty(self) -> float:
        """Half the width of the median's confidence interval, relative to the median."""
        return (self.high - self.low) / 2 / self.p50 if self.p50 else 0.0


def summarise(samples: Sequence[float] | Any) -> SampleSummary:
    ordered = numpy.sort(numpy.asarray(samples, dtype=numpy.float64))
    count = len(ordered)
    if count == 0:
        raise ValueError("a summary needs at least one sample")
    percents = (25, 50, 75, 95, 99)
    percentiles = numpy.percentile(ordered, percents).tolist()
    # The number of samples below the median is binomial: these two order statistics enclose it.
    reach = _TWO_SIDED_95 * math.sqrt(count) / 2
    low = max(0, math.floor(count / 2 - reach) - 1)
    high = min(count - 1, math.ceil(count / 2 + reach))
    return SampleSummary(
        **{f"p{percent}": at for percent, at in zip(percents, percentiles, strict=True)},
        min=float(ordered[0]),
        max=float(ordered[-1]),
        mean=float(ordered.mean()),
        low=float(ordered[low]),
        high=float(ordered[high]),
    )


@dataclass(frozen=True)
class Row:
    """One backend, one collective, one size. Times are microseconds, bandwidths GB/s (1e9)."""

    collective: str
    size_bytes: int
    count: int
    dtype: str
    op: str
    root: int
    """-1 if each rank is the root in turn, as in nccl-tests."""
    backend: str
    ranks: int
    time_us: SampleSummary
    skew_us: float | None
    """How far apart the ranks arrived, median; None if their clocks cannot be compared."""
    transfer_us: float | None
    """From the last rank's arrival to the last one's end, median."""
    algbw: float
    busbw: float
    wrong: int
    floor_us: float | None
    expected_us: float | None
    calibrates: bool
    """Whether the model was fitted to this row; then it has no verdict on it."""
    samples: int
    calls_per_sample: int
    disturbed_share: float
    expected_low_us: float | None = None
    expected_high_us: float | None = None
    """The middle half of the expected times, from the calibration rows."""

    def as_dict(self) -> dict[str, Any]:
        """As plain values (docs/bench.md), with derived numbers."""
        return dataclasses.asdict(self) | {"spread": self.time_us.spread, "verdict": self.verdict}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        names = [item.name for item in dataclasses.fields(cls)]
        known = {name: values[name] for name in names if name in values}  # older files lack some
        return cls(**known | {"time_us": SampleSummary(**values["time_us"])})

    @property
    def key(self) -> tuple[str | int, ...]:
        """What identifies a row in two runs."""
        what = (self.collective, self.size_bytes, self.dtype, self.op, self.root)
        return (*what, self.backend, self.ranks)

    @property
    def disturbed(self) -> bool:
        return self.disturbed_share > DISTURBED_SHARE

    @property
    def verdict(self) -> str:
        if self.expected_us is None:
            return "calibrates" if self.calibrates else ""
        ratio = self.time_us.p50 / self.expected_us
        low, high = self.range_us
        if self.time_us.p25 > high:
            return f"slow by {ratio:.1f}x"
        if self.time_us.p75 < low:
            return f"fast by {1 / ratio:.1f}x"
        return "normal"

    @property
    def range_us(self) -> tuple[float, float]:
        """The expected range, if any: the middle half of the row's samples should be inside."""
        expected = self.expected_us or 0.0
        low, high = self.expected_low_us or expected, self.expected_high_us or expected
        return low / TOLERANCE, high * TOLERANCE

    @property
    def agrees(self) -> bool:
        """Whether its samples agree, and those of its calibration rows: then a number can be
        expected, and not only a range."""
        if not self.expected_us:
            return False
        low, high = self.range_us
        width = (high / TOLERANCE - low * TOLERANCE) / self.expected_us
        return max(self.time_us.spread, width) <= AGREEING


@dataclass(frozen=True)
class Skipped:
    """A request that could not be measured, why, and what would help."""

    what: str
    """"mpi", or "mpi reduce_scatter" if a backend lacks a collective."""
    reason: str
    install: str | None = None

    def __str__(self) -> str:
        help = f" ({self.install})" if self.install else ""
        return f"{self.what} is skipped: {self.reason}{help}"


@dataclass
class Run:
    """Everything that one run measured, where, and how. It grows during the run."""

    machine: dict[str, Any]
    versions: dict[str, str]
    settings: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    finished: bool = False

    @property
    def wrong(self) -> int:
        return sum(row.wrong for row in self.rows)

    @property
    def held_out_error(self) -> dict[str, float]:
        """By backend, the mean error of the expectation for undisturbed rows outside the fit whose
        samples agree."""
        pairs: dict[str, list[tuple[float, float]]] = {}
        for row in self.rows:
            if row.expected_us is not None and row.agrees and not row.disturbed:
                pairs.setdefault(row.backend, []).append((row.expected_us, row.time_us.p50))
        return {backend: mean_absolute_error(of_backend) for backend, of_backend in pairs.items()}

    @property
    def backends(self) -> list[str]:
        return list(dict.fromkeys(row.backend for row in self.in_order))

    @property
    def in_order(self) -> list[Row]:
        """The rows sorted by collective, size and backend."""
        return [row for rows in by_collective(self.rows) for row in rows]


def by_collective(rows: Iterable[Row]) -> list[list[Row]]:
    """The rows of each collective, sorted by size; the backends keep their order."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.collective, []).append(row)
    return [sorted(of, key=attrgetter("size_bytes")) for of in found.values()]


def by_size(rows: Iterable[Row]) -> list[list[Row]]:
    """The rows of a collective, size by size; the first backend's comes first."""
    return [list(of) for _, of in groupby(rows, attrgetter("size_bytes"))]


def to_json(run: Run) -> str:
    document: dict[str, Any] = {"schema": SCHEMA, **dataclasses.asdict(run)}
    document["rows"] = [row.as_dict() for row in run.in_order]
    document["held_out_error"] = run.held_out_error
    return json.dumps(document, indent=1) + "\n"


def from_json(text: str, where: str = "the file") -> Run:
    """The run that `to_json` wrote. Raises UnisonoError for any other text."""
    try:
        document = json.loads(text)
    except ValueError as error:
        raise UnisonoError(f"{where} is not JSON: {error}") from error
    schema = document.pop("schema", None) if isinstance(document, dict) else None
    if schema != SCHEMA:
        raise UnisonoError(f"{where} is not a result of `unisono bench --json` ({SCHEMA})")
    document["rows"] = [Row.from_dict(row) for row in document["rows"]]
    document["skipped"] = [Skipped(**skipped) for skipped in document["skipped"]]
    known = {item.name for item in dataclasses.fields(Run)}
    return Run(**{name: value for name, value in document.items() if name in known})


def read(path: Path) -> Run:
    try:
        return from_json(path.read_text(), str(path))
    except OSError as error:
        raise UnisonoError(f"{path} cannot be read: {error.strerror}") from error
