"""What comes of measured times: the table, geometric means, goals, and the files that keep them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

KIB, MIB = 1024, 1024**2
LIBRARIES = ("unisono", "mpi", "gloo")
MOVERS = ("all_gather", "reduce_scatter", "broadcast", "all_to_all")
ALL_MOVERS = "those four"
DISTURBED_AT_MOST = 0.4
HEADINGS = (
    "collective",
    "size",
    *(f"{name} us" for name in (*LIBRARIES, "floor")),
    "mpi/unisono",
    "gloo/unisono",
)


@dataclass(frozen=True)
class Row:
    """One collective at one size: each library's median time and quartiles over all turns."""

    collective: str
    bytes: int
    turns: int
    median_us: dict[str, float] = field(default_factory=dict)
    quartiles_us: dict[str, tuple[float, float]] = field(default_factory=dict)
    disturbed_share: dict[str, float] = field(default_factory=dict)
    """The share of a library's turns in which a rank wanted to run and had no core."""

    @property
    def disturbed(self) -> bool:
        """Whether so many turns were disturbed that the medians may be."""
        return max(self.disturbed_share.values(), default=0.0) > DISTURBED_AT_MOST

    def ratio(self, slower: str, faster: str = "unisono") -> float | None:
        """How many times longer `slower` takes; None unless both were measured."""
        if slower not in self.median_us or faster not in self.median_us:
            return None
        return self.median_us[slower] / self.median_us[faster]

    def __str__(self) -> str:
        mark = " (disturbed)" if self.disturbed else ""
        return f"{self.collective} {size_text(self.bytes)}{mark}"


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


@dataclass(frozen=True)
class Results:
    """Everything that one run measured, and where."""

    facts: dict[str, str]
    ranks: int
    cores: int
    rows: list[Row]
    idle_percent: dict[str, float]


def size_text(nbytes: int) -> str:
    """8 -> "8 B", 65536 -> "64 KiB"."""
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes} B" if nbytes else "-"


def parse_sizes(text: str) -> list[int]:
    """ "8,64KiB,1 MiB" -> [8, 65536, 1048576]."""
    sizes = []
    for size in text.split(","):
        number = size.strip().upper().removesuffix("B").removesuffix("I")
        unit = {"K": KIB, "M": MIB}.get(number[-1:], 1)
        sizes.append(int(number.rstrip("KM ")) * unit)
    return sizes


def time_text(time_us: float | None) -> str:
    """Three digits or so, whatever the size of the number."""
    if time_us is None:
        return "-"
    digits = 2 if time_us < 10 else 1 if time_us < 100 else 0
    return f"{time_us:,.{digits}f}"


def cells(row: Row) -> list[str]:
    times = [time_text(row.median_us.get(name)) for name in (*LIBRARIES, "floor")]
    ratios = [row.ratio(peer) for peer in ("mpi", "gloo")]
    shown = ["-" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
    name = f"{row.collective} *" if row.disturbed else row.collective
    return [name, size_text(row.bytes), *times, *shown]


def plain_line(texts: Sequence[str]) -> str:
    """A line of the table for a terminal; its width is fixed, since rows are shown as they come."""
    first, *others = texts
    return f"{first:<16}" + "".join(f"{text:>13}" for text in others)


def markdown_table(rows: Sequence[Row]) -> str:
    rulers = ["---", *["---:"] * (len(HEADINGS) - 1)]
    lines = [HEADINGS, rulers, *(cells(row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def geometric_means(rows: Sequence[Row]) -> dict[tuple[str, str], float]:
    """(collective, peer) -> how many times longer the peer takes, over all sizes.

    The collectives that have a goal together appear once more, as one.
    """
    names = list(dict.fromkeys(row.collective for row in rows))
    kinds: dict[str, tuple[str, ...]] = {name: (name,) for name in names}
    if set(MOVERS) <= set(names):
        kinds[ALL_MOVERS] = MOVERS
    means = {}
    for name, members in kinds.items():
        for peer in ("mpi", "gloo"):
            ratios = [row.ratio(peer) for row in rows if row.collective in members]
            known = [ratio for ratio in ratios if ratio is not None]
            if known:
                means[name, peer] = statistics.geometric_mean(known)
    return means


def goals(results: Results) -> list[Goal]:
    """The goals that apply to a run with so many ranks on so many cores."""
    ranks = results.ranks
    crowded = ranks > results.cores
    found: list[tuple[str, float | None, float, bool]] = []
    for row in results.rows:
        mpi = (f"{row}: mpi/unisono", row.ratio("mpi"))
        if row.collective == "all_reduce" and ranks == 2 and not crowded:
            steps = ((8, 2.0), (KIB, 1.5), (256 * KIB, 1.3), (64 * MIB, 2.0))
            reached = [bound for least_bytes, bound in steps if row.bytes >= least_bytes]
            if row.bytes == 8 or row.bytes >= KIB:
                found.append((*mpi, reached[-1], False))
            if row.bytes >= 64 * MIB:
                found.append((f"{row}: unisono/floor", row.ratio("unisono", "floor"), 1.2, True))
        elif row.collective == "all_reduce" and (not crowded or row.bytes == 8):
            found.append((*mpi, 1.0, False))
            if row.bytes == 64 * MIB and ranks in (8, 16):
                bound = 2.5 if ranks == 8 else 2.0
                found.append((f"{row}: gloo/unisono", row.ratio("gloo"), bound, False))
        elif row.collective in (*MOVERS, "round trip") and ranks == 2 and not crowded:
            found.append((*mpi, 1.0, False))
        elif row.collective == "async all_reduce" and not crowded:
            found.append((f"{row}: us", row.median_us.get("unisono"), 10.0, True))
    if ranks == 2 and not crowded:
        mean = geometric_means(results.rows).get((ALL_MOVERS, "mpi"))
        found.append((f"{', '.join(MOVERS)}: geometric mean of mpi/unisono", mean, 1.3, False))
    waiting = results.idle_percent.get("unisono")
    found.append(("a rank that waits: % of a core", waiting, 2.0, True))
    return [
        Goal(what, figure, bound, at_most)
        for what, figure, bound, at_most in found
        if figure is not None
    ]


def summary(results: Results, with_goals: bool) -> str:
    """What follows below the table."""
    lines = []
    if any(row.disturbed for row in results.rows):
        lines += ["", "* other programs took the cores: measure again"]
    means = geometric_means(results.rows)
    if means:
        lines += ["", "geometric means"]
    for (name, peer), mean in means.items():
        lines.append(f"  {name:<14}  {peer}/unisono {mean:.2f}")
    percents = [f"{name} {percent:.1f}" for name, percent in results.idle_percent.items()]
    lines += ["", f"% of a core while a rank waits a second in a barrier: {', '.join(percents)}"]
    if with_goals:
        lines += ["", "goals", *(f"  {goal}" for goal in goals(results))]
    return "\n".join(lines)


def save_json(results: Results, path: Path) -> None:
    means = [[*names, mean] for names, mean in geometric_means(results.rows).items()]
    path.write_text(json.dumps({**asdict(results), "geometric_means": means}, indent=1) + "\n")


def save_markdown(results: Results, path: Path) -> None:
    facts = "\n".join(f"- {name}: {value}" for name, value in results.facts.items())
    path.write_text(f"{markdown_table(results.rows)}\n\n{facts}\n")
