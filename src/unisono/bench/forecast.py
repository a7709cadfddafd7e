"""What each row should take: models fitted to the calibration rows of the same run, and for a run
of one or two sizes to those of an earlier one, which are kept in the user's cache folder."""

from __future__ import annotations

import dataclasses
import datetime
import json
import logging
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import unisono
from unisono.bench import machine
from unisono.bench.collectives import COLLECTIVES
from unisono.bench.results import Model, Row
from unisono.bench.settings import BenchSettings
from unisono.cache import cache_folder, write_whole
from unisono.plan.predict import CostModel, fit, mean_absolute_error, reduction_s_per_byte

_Series: TypeAlias = "tuple[str, str, str]"

REDUCTION_PAIRS = (("reduce_scatter", "all_to_all"), ("reduce", "broadcast"))
"""A collective that reduces, and one that moves the same bytes without."""

SCHEMA = "unisono-bench-models/1"
ENOUGH_SIZES = 3
"""Fewer do not show the regimes of caches and memory."""
BEYOND = 4
"""How many times smaller or larger a size may be than those that were measured."""

_log = logging.getLogger("unisono")


class Forecast:
    """Learns from rows that calibrate, and says what the others should take."""

    def __init__(self, kept: KeptModels | None = None) -> None:
        self._times_s: defaultdict[_Series, dict[int, float]] = defaultdict(dict)
        self._kept = kept
        """What earlier runs measured, for series that are too short for a model of their own."""

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
            kept = None if self._kept is None else self._kept.model(row)
            row = dataclasses.replace(row, calibrates=True)
            if kept is None:
                return row
            earlier, origin = kept
            expected_us = earlier.predict_s(row.size_bytes) * 1e6
            return dataclasses.replace(row, expected_us=expected_us, expected_from=origin)
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


# -- models of earlier runs --------------------------------------------------------------------


class KeptModels:
    """The kept measurements of this machine with so many ranks, for runs with these settings."""

    def __init__(self, settings: BenchSettings, hosts: int = 1) -> None:
        self._settings = settings
        facts = machine.machine()
        self._machine = {name: facts[name] for name in ("processor", "architecture", "cores")}
        name = machine.machine_name(facts, settings.ranks) + (
            f"-{hosts}-hosts" if hosts > 1 else ""
        )
        name += "" if settings.device == "cpu" else f"-{settings.device}"
        self.path = Path(cache_folder()) / "bench" / f"{name}.json"
        self._series = self._read()

    def model(self, row: Row) -> tuple[CostModel, str] | None:
        """The model for what a row measures, and where it comes from; None where there is none, or
        where the row lies far from all sizes that it knows."""
        kept = self._series.get(self._key(row))
        if kept is None:
            return None
        times_s = {int(size): time_us / 1e6 for size, time_us in kept["times_us"].items()}
        if not min(times_s) / BEYOND <= row.size_bytes <= max(times_s) * BEYOND:
            return None
        return fit(times_s), f"{kept['measured']}, unisono {kept['unisono']}"

    def keep(self, rows: Sequence[Row]) -> None:
        """Keep what calibrates, where it was measured at enough sizes and nothing disturbed it."""
        found: dict[str, list[Row]] = {}
        for row in rows:
            if row.calibrates and not row.wrong:
                found.setdefault(self._key(row), []).append(row)
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
        new = {
            key: {
                "times_us": {str(row.size_bytes): row.time_us.p50 for row in series},
                "measured": now,
                "unisono": unisono.__version__,
            }
            for key, series in found.items()
            if not any(row.disturbed for row in series)
            and (len(series) >= ENOUGH_SIZES or not COLLECTIVES[series[0].collective].sized)
        }
        if new:
            self._write(self._read() | new)  # another run may have kept something meanwhile

    def _key(self, row: Row) -> str:
        """All that a time depends on beside the size, in words."""
        spins = ", spinning" if self._settings.mpi_spins and row.backend == "mpi" else ""
        root = "" if row.root < 0 else f", root {row.root}"
        return (
            f"{row.collective}, {row.backend}{spins}, {row.dtype}, {row.op}{root}, "
            f"{row.place} place, {self._settings.over} of ranks"
        )

    def _read(self) -> dict[str, Any]:
        """What is kept; nothing where the file is of another version or machine, or damaged."""
        try:
            document = json.loads(self.path.read_text())
            if (document["schema"], document["machine"]) != (SCHEMA, self._machine):
                return {}
            for kept in document["series"].values():
                fit({int(size): float(time_us) for size, time_us in kept["times_us"].items()})
                f"{kept['measured']}{kept['unisono']}"
            series: dict[str, Any] = document["series"]
            return series
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            _log.warning(
                "unisono: models of earlier runs in %s cannot be used: %s", self.path, error
            )
            return {}

    def _write(self, series: dict[str, Any]) -> None:
        document = {"schema": SCHEMA, "machine": self._machine, "series": series}
        try:
            write_whole(str(self.path), json.dumps(document, indent=1) + "\n")
        except OSError as error:  # a home that cannot be written is no reason to fail
            _log.info("unisono: models are not kept in %s: %s", self.path, error)
