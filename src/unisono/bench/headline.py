"""Who is faster, and by how much: the sentence that a reader takes away."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.bench import text
from unisono.bench.results import Row, Run
from unisono.bench.statistics import geometric_mean
from unisono.errors import name_number

ALIKE = 1.05
"""Times closer than this are called equal."""


@dataclass(frozen=True)
class Duel:
    """The first backend and the fastest other one at one size of one collective."""

    first: Row
    other: Row

    @property
    def ratio(self) -> float:
        """How many times as fast the first one is."""
        return self.other.time_us.p50 / self.first.time_us.p50


def duels(run: Run) -> list[Duel]:
    """The first backend against the fastest other, wherever both were measured and right."""
    found = []
    for rows in text.tables(run, run.rows):
        for size in dict.fromkeys(row.size_bytes for row in rows):
            here = [row for row in rows if row.size_bytes == size and not row.wrong]
            first = [row for row in here if row.backend == _first(run)]
            others = [row for row in here if row.backend != _first(run)]
            if first and others:
                found.append(Duel(first[0], min(others, key=lambda row: row.time_us.p50)))
    return found


def headline(run: Run) -> str:
    """The run in a sentence."""
    against = duels(run)
    if not against:
        return (
            f"{', '.join(run.backends) or 'Nothing'}: {name_number(len(run.rows), 'measurement')}"
        )
    first, *rivals = sorted(run.backends, key=lambda name: (name != _first(run), name))
    others = rivals[0]
    if len(rivals) > 1:
        degree = "faster" if len(rivals) == 2 else "fastest"
        others = f"the {degree} of {', '.join(rivals[:-1])} and {rivals[-1]}"
    mean = geometric_mean([duel.ratio for duel in against])
    won = sum(duel.ratio > 1 for duel in against)
    if 1 / ALIKE < mean < ALIKE:
        how = f"{first} and {others} are equally fast on average"
    elif mean > 1:
        how = f"{first} is {text.ratio_text(mean)} times as fast as {others} on average"
    else:
        how = f"{first} takes {text.ratio_text(1 / mean)} times as long as {others} on average"
    return f"{how}, and ahead in {won} of {name_number(len(against), 'row')}"


def _first(run: Run) -> str:
    """The first backend that was asked for and measured."""
    asked = run.settings.get("backends", [])
    return next((name for name in asked if name in run.backends), next(iter(run.backends), ""))
