"""The goals of the engine, and how far behind its peers are on average."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from unisono.bench.results import Row, Run
from unisono.bench.text import size_text

KIB, MIB = 1024, 1024**2
PEERS = ("mpi", "gloo")
MOVERS = ("all_gather", "reduce_scatter", "broadcast", "all_to_all")
ALL_MOVERS = "those four"


@dataclass(frozen=True)
class Goal:
    """A figure and the bound it should keep."""

    what: str
    figure: float
    bound: float
    at_most: bool = False

    def __str__(self) -> str:
        met = self.figure <= self.bound if self.at_most else self.figure >= self.bound
        bound = f"at most {self.bound:g}" if self.at_most else f"at least {self.bound:g}"
        return f"{'met   ' if met else 'MISSED'}  {self.what} {self.figure:.2f}, {bound}"


class Figures:
    """One run, by collective, size and backend."""

    def __init__(self, run: Run) -> None:
        self.ranks = int(run.settings["ranks"])
        self.crowded = self.ranks > int(run.machine["cores"])
        self.run = run
        self._rows: dict[tuple[str, int], dict[str, Row]] = {}
        for row in run.in_order:
            self._rows.setdefault((row.collective, row.size_bytes), {})[row.backend] = row

    def ratio(self, key: tuple[str, int], slower: str, faster: str = "unisono") -> float | None:
        """How many times longer `slower` takes; None unless both were measured."""
        rows = self._rows[key]
        if faster not in rows:
            return None
        ours = rows[faster].time_us.p50
        if slower == "floor":
            floor_us = rows[faster].floor_us
            return floor_us / ours if floor_us else None
        return rows[slower].time_us.p50 / ours if slower in rows else None

    def geometric_means(self) -> dict[tuple[str, str], float]:
        """(collective, peer) -> how many times longer the peer takes, over all sizes."""
        names = list(dict.fromkeys(name for name, _ in self._rows))
        kinds: dict[str, Sequence[str]] = {name: (name,) for name in names}
        if set(MOVERS) <= set(names):
            kinds[ALL_MOVERS] = MOVERS
        means = {}
        for name, members in kinds.items():
            for peer in PEERS:
                ratios = [self.ratio(key, peer) for key in self._rows if key[0] in members]
                known = [ratio for ratio in ratios if ratio is not None]
                if known:
                    means[name, peer] = geometric_mean(known)
        return means

    def goals(self, idle_percent: float | None) -> list[Goal]:
        """The goals that apply to a run with this many ranks on this many cores."""
        found = [goal for key in self._rows for goal in self._goals_of(key)]
        if self.ranks == 2 and not self.crowded:
            mean = self.geometric_means().get((ALL_MOVERS, "mpi"))
            what = f"{', '.join(MOVERS)}: geometric mean of mpi/unisono"
            found.append((what, mean, 1.3, False))
        found.append(("a rank that waits: % of a core", idle_percent, 2.0, True))
        error = self.run.held_out_error.get("unisono")
        percent = None if error is None else 100 * error
        found.append(("expected times: mean absolute error in %", percent, 10.0, True))
        return [
            Goal(what, figure, bound, at_most)
            for what, figure, bound, at_most in found
            if figure is not None
        ]

    def _goals_of(self, key: tuple[str, int]) -> list[tuple[str, float | None, float, bool]]:
        collective, size = key
        mark = " (disturbed)" if any(row.disturbed for row in self._rows[key].values()) else ""
        name = f"{collective} {size_text(size)}{mark}"
        mpi = (f"{name}: mpi/unisono", self.ratio(key, "mpi"))
        pair = self.ranks == 2 and not self.crowded
        if collective == "all_reduce" and pair:
            steps = ((8, 2.0), (KIB, 1.5), (256 * KIB, 1.3), (64 * MIB, 2.0))
            reached = [bound for least_bytes, bound in steps if size >= least_bytes]
            found = [(*mpi, reached[-1], False)] if size == 8 or size >= KIB else []
            floor = self.ratio(key, "floor")
            if size >= 64 * MIB and floor:
                found.append((f"{name}: unisono/floor", 1 / floor, 1.2, True))
            return found
        if collective == "all_reduce" and (not self.crowded or size == 8):
            found = [(*mpi, 1.0, False)]
            if size == 64 * MIB and self.ranks in (8, 16):
                bound = 2.5 if self.ranks == 8 else 2.0
                found.append((f"{name}: gloo/unisono", self.ratio(key, "gloo"), bound, False))
            return found
        if collective in (*MOVERS, "ping_pong") and pair:
            return [(*mpi, 1.0, False)]
        if key == ("all_reduce_async", 8) and not self.crowded:
            return [(f"{name}: us", self._rows[key]["unisono"].time_us.p50, 10.0, True)]
        return []


def summary(figures: Figures, idle_percent: float | None, with_goals: bool) -> str:
    """What follows below the tables."""
    lines = ["", "geometric means"]
    for (name, peer), mean in figures.geometric_means().items():
        lines.append(f"  {name:<16}  {peer}/unisono {mean:.2f}")
    if idle_percent is not None:
        lines += ["", f"% of a core while a rank waits a second in a barrier: {idle_percent:.1f}"]
    if with_goals:
        lines += ["", "goals", *(f"  {goal}" for goal in figures.goals(idle_percent))]
    return "\n".join(lines)
