"""What each row should take: models fitted to the calibration rows of the same run."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import TypeAlias

from unisono.bench.collectives import COLLECTIVES
from unisono.bench.results import Model, Row
from unisono.plan.predict import CostModel, fit, mean_absolute_error, reduction_s_per_byte

_Series: TypeAlias = "tuple[str, str, str]"

REDUCTION_PAIRS = (("reduce_scatter", "all_to_all"), ("reduce", "broadcast"))
"""A collective that reduces, and one that moves the same bytes without."""


class Forecast:
    """Learns from rows that calibrate, and says what the others should take."""

    def __init__(self) -> None:
        self._times_s: defaultdict[_Series, dict[int, float]] = defaultdict(dict)

    def learn(self, rows: Sequence[Row]) -> None:
        """Add rows of calibration sizes."""
        for row in rows:
            self._times_s[_series(row)][row.size_bytes] = row.time_us.p50 / 1e6

    def model(self, series: _Series) -> CostModel | None:
        """The model of a backend's collective, as far as it has been measured."""
        times_s = self._times_s.get(series)
        return fit(times_s, self._like(series)) if times_s else None

    def _like(self, series: _Series) -> CostModel | None:
        """A well measured collective of the same backend and kind."""
        backend, collective, _ = series
        if len(self._times_s[series]) > 2 or not COLLECTIVES[collective].sized:
            return None
        for other, times_s in self._times_s.items():
            same = COLLECTIVES[other[1]].reduces == COLLECTIVES[collective].reduces
            if other[0] == backend and same and len(times_s) > 2:
                return fit(times_s)
        return None

    def expect(self, row: Row, calibrates: bool) -> Row:
        """The row with what was expected of it. Only calibration rows were looked at for that."""
        if calibrates:
            return dataclasses.replace(row, calibrates=True)
        model = self.model(_series(row))
        if model is None:
            return row
        return dataclasses.replace(row, expected_us=model.predict_s(row.size_bytes) * 1e6)

    def models(self) -> list[Model]:
        """All fits, in plain units."""
        found = []
        for series, times_s in self._times_s.items():
            model = fit(times_s, self._like(series))
            regimes = [[size, rate / 1e9] for size, rate in model.bandwidths()]
            found.append(Model(series[0], series[1], model.latency_s * 1e6, regimes))
        return found

    def reduction_ns_per_byte(self) -> dict[str, float]:
        """For each backend what combining costs per byte, at the largest size that tells."""
        found: dict[str, float] = {}
        for reducing, moving in REDUCTION_PAIRS:
            for backend, collective, _ in list(self._times_s):
                if collective != reducing or backend in found:
                    continue
                ours = self._any(backend, reducing)
                theirs = self._any(backend, moving)
                if ours and theirs and ours.sizes_bytes and theirs.sizes_bytes:
                    size = min(ours.sizes_bytes[-1], theirs.sizes_bytes[-1])
                    found[backend] = reduction_s_per_byte(ours, theirs, size) * 1e9
        return found

    def _any(self, backend: str, collective: str) -> CostModel | None:
        for series in self._times_s:
            if series[:2] == (backend, collective):
                return self.model(series)
        return None


def held_out_error(rows: Sequence[Row]) -> dict[str, float]:
    """Backend -> mean absolute error of what was expected of rows that were not calibrated on.

    A row that other programs disturbed says nothing about the model and is left out.
    """
    pairs: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        if row.expected_us is not None and not row.disturbed and not row.calibrates:
            pairs[row.backend].append((row.expected_us, row.time_us.p50))
    errors = {backend: mean_absolute_error(of_backend) for backend, of_backend in pairs.items()}
    return {backend: error for backend, error in errors.items() if error is not None}


def _series(row: Row) -> _Series:
    return row.backend, row.collective, row.place
