"""What each row should take: models fitted to the calibration rows of the same run."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import TypeAlias

from unisono.bench.results import Row
from unisono.plan.predict import fit

_Series: TypeAlias = "tuple[str, str]"


class Forecast:
    """Learns from rows that calibrate, and says what the others should take."""

    def __init__(self) -> None:
        self._times_s: defaultdict[_Series, dict[int, float]] = defaultdict(dict)

    def learn(self, rows: Sequence[Row]) -> None:
        """Add rows of calibration sizes."""
        for row in rows:
            self._times_s[_series(row)][row.size_bytes] = row.time_us.p50 / 1e6

    def expect(self, row: Row, calibrates: bool) -> Row:
        """The row with what was expected of it. Only calibration rows were looked at for that."""
        if calibrates:
            return dataclasses.replace(row, calibrates=True)
        times_s = self._times_s.get(_series(row))
        if not times_s:
            return row
        expected_us = fit(times_s).predict_s(row.size_bytes) * 1e6
        return dataclasses.replace(row, expected_us=expected_us)


def _series(row: Row) -> _Series:
    return row.backend, row.collective
