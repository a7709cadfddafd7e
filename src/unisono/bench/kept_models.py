"""What earlier runs on this machine measured, so that a run of one or two sizes has a verdict, too.

A file per machine and number of ranks in the user's cache folder, as JSON. A run that measures
enough sizes of something replaces what an earlier run left of it.
"""

from __future__ import annotations

import datetime
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import unisono
from unisono.bench import machine
from unisono.bench.collectives import COLLECTIVES
from unisono.bench.results import Row
from unisono.bench.settings import BenchSettings
from unisono.cache import cache_folder, write_whole
from unisono.plan.predict import CostModel, fit

SCHEMA = "unisono-bench-models/1"
ENOUGH_SIZES = 3
"""Fewer do not show the regimes of caches and memory."""
BEYOND = 4
"""How many times smaller or larger a size may be than those that were measured."""

_log = logging.getLogger("unisono")


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
            f"{row.placement} place, {self._settings.over} of ranks"
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
