"""Who is faster, where, and by how much: the sentences that a reader takes away."""

from __future__ import annotations

from collections.abc import Sequence
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
                best = min(others, key=lambda row: row.time_us.p50)
                found.append(Duel(first[0], best))
    return found


def headline(run: Run) -> str:
    """The run in a sentence."""
    against = duels(run)
    if not against:
        names = ", ".join(dict.fromkeys(row.backend for row in run.in_order))
        return f"{names or 'Nothing'}: {name_number(len(run.rows), 'measurement')}"
    rivals = sorted({row.backend for row in run.rows} - {_first(run)})
    others = rivals[0]
    if len(rivals) > 1:
        degree = "faster" if len(rivals) == 2 else "fastest"
        others = f"the {degree} of {', '.join(rivals[:-1])} and {rivals[-1]}"
    mean = geometric_mean([duel.ratio for duel in against])
    won = sum(duel.ratio > 1 for duel in against)
    first = _first(run)
    if 1 / ALIKE < mean < ALIKE:
        how = f"{first} and {others} are equally fast on average"
    elif mean > 1:
        how = f"{first} is {_times(mean)} as fast as {others} on average"
    else:
        how = f"{first} takes {_times(1 / mean)} as long as {others} on average"
    return f"{how}, and ahead in {won} of {name_number(len(against), 'row')}"


def highlights(run: Run) -> list[str]:
    """Where the first backend is furthest ahead, and where it is behind."""
    against = sorted(duels(run), key=lambda duel: duel.ratio)
    if not against:
        return []
    lines = []
    best, worst = against[-1], against[0]
    if best.ratio > ALIKE:
        lines.append(
            f"Furthest ahead: {_where(best)}, {_times(best.ratio)} as fast ({_pair(best)})"
        )
    if worst.ratio < 1 / ALIKE:
        behind = [duel for duel in against if duel.ratio < 1 / ALIKE]
        lines.append(
            f"Furthest behind: {_where(worst)}, {_times(1 / worst.ratio)} as long "
            f"({_pair(worst)}); behind in {len(behind)} of {name_number(len(against), 'row')}"
        )
    elif worst.ratio < ALIKE:
        lines.append(f"Closest: {_where(worst)} ({_pair(worst)})")
    return lines


def _first(run: Run) -> str:
    backends: Sequence[str] = run.settings.get("backends", [])
    measured = [row.backend for row in run.in_order]
    return next((name for name in backends if name in measured), measured[0] if measured else "")


def _where(duel: Duel) -> str:
    size = f" of {text.size_text(duel.first.size_bytes)}" if duel.first.size_bytes else ""
    return f"{duel.first.collective}{size}"


def _pair(duel: Duel) -> str:
    times = [text.time_text(row.time_us.p50) for row in (duel.first, duel.other)]
    return f"{times[0]} us against {times[1]} us of {duel.other.backend}"


def _times(ratio: float) -> str:
    return f"{ratio:.2f} times" if ratio < 10 else f"{ratio:.0f} times"
