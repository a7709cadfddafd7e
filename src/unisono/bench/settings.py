"""What a run is asked to do, the same on every rank."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import Any

from unisono.bench.backends.base import Case
from unisono.bench.collectives import COLLECTIVES, Collective, Placement, item_bytes
from unisono.bench.floor import floor_bytes
from unisono.plan.predict import calibration_sizes
from unisono.plan.sizes import format_size

BUDGET_S = 2.0
DEFAULT_RUN_S = 55.0
"""Seconds for all rows of a run without a budget, where BUDGET_S for each would be more."""
LEAST_BUDGET_S = 0.15


@dataclass(frozen=True)
class BenchSettings:
    """Everything that can be chosen. `budget_s` is for one row, all backends together; `fresh`:
    without models of earlier runs."""

    ranks: int
    collectives: tuple[str, ...]
    sizes_bytes: tuple[int, ...]
    backends: tuple[str, ...]
    algorithms: tuple[str, ...] = ()
    device: str = "cpu"
    dtype: str = "float32"
    op: str = "sum"
    root: int | None = None
    placement: str = "natural"
    over: str = "max"
    floor: bool = True
    mpi_spins: bool = False
    fresh: bool = False
    budget_s: float = BUDGET_S

    def as_dict(self) -> dict[str, Any]:
        """As plain values, under the names that files of results have."""
        values = asdict(self)
        return {"place" if name == "placement" else name: values[name] for name in values}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> BenchSettings:
        """What `as_dict` returned, also after a way through JSON."""
        kept: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        return cls(placement=kept.pop("place"), **kept)

    def placements(self, collective: Collective) -> tuple[Placement, ...]:
        """Whether a collective works in place, out of place, or both, as was asked for."""
        if self.placement == "natural":
            return collective.placements[:1]
        if self.placement == "both":
            return collective.placements
        return tuple(
            placement for placement in collective.placements if placement == self.placement
        )

    def roots(self) -> tuple[int, ...]:
        """Who is the root: each rank in turn, unless one was chosen."""
        return tuple(range(self.ranks)) if self.root is None else (self.root,)

    def cases(self, caches_bytes: tuple[int, ...] = ()) -> list[tuple[Case, bool]]:
        """All rows in the order of measuring, each with whether the model is fitted to it."""
        found = []
        for name in self.collectives:
            collective = COLLECTIVES[name]
            sizes = self.sizes_bytes if collective.sized else (0,)
            first = calibration_sizes(sizes, caches_bytes)
            order = [*first, *(size for size in sizes if size not in first)]
            found += [
                (self._case(collective, size, placement), size in first)
                for placement in self.placements(collective)
                for size in order
            ]
        return found

    def _case(self, collective: Collective, size: int, placement: Placement) -> Case:
        # Interned, as the name in a program's source is: the engine knows such names by address.
        op = sys.intern(self.op)
        return Case(collective, size, placement, self.dtype, op, self.roots(), self.ranks)

    def memory_bytes(self) -> tuple[int, str]:
        """What the largest row needs on all ranks together, and what that row is.

        Buffers and the floor's, and once more the wide side: gloo and MPI keep copies.
        """
        items = item_bytes(self.dtype)
        needs = []
        for case, _ in self.cases():
            counts = case.collective.counts(case.size_bytes, items, self.ranks)
            sides = [counts.output, counts.input]
            buffers = max(sides) if case.placement == "in" else sum(sides)
            each = items * (buffers + max(sides)) + (floor_bytes(case, items) if self.floor else 0)
            what = f"{case.collective.name} of {format_size(case.size_bytes)}B"
            needs.append((each * self.ranks, what))
        return max(needs, default=(0, "nothing"))


def budget_s(rows: int) -> float:
    """A row's time where nobody chose one: a run of many rows must not take forever."""
    return max(LEAST_BUDGET_S, min(BUDGET_S, DEFAULT_RUN_S / max(1, rows)))
