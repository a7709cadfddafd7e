"""Two runs with the same settings: what became slower or faster, and what is only noise."""

from dataclasses import dataclass
from statistics import geometric_mean

from unisono.bench import text
from unisono.bench.results import Row, Run
from unisono.errors import UnisonoError

THRESHOLD = 0.10


@dataclass(frozen=True)
class Change:
    """One row in both runs."""

    old: Row
    new: Row
    threshold: float

    @property
    def ratio(self) -> float:
        """The new time divided by the old."""
        return self.new.time_us.p50 / self.old.time_us.p50

    @property
    def kind(self) -> str:
        """slower or faster, if the medians and the middle halves of the samples agree."""
        old, new = self.old.time_us, self.new.time_us
        if self.new.wrong > self.old.wrong:
            return "wrong"
        if self.ratio > 1 + self.threshold and new.p25 > old.p75:
            return "slower"
        if self.ratio < 1 / (1 + self.threshold) and new.p75 < old.p25:
            return "faster"
        return "noise" if abs(self.ratio - 1) > self.threshold else "same"

    @property
    def disturbed(self) -> bool:
        return self.old.disturbed or self.new.disturbed


@dataclass(frozen=True)
class Comparison:
    """Every row that both runs have, and how many are in only one."""

    changes: list[Change]
    only_old: int
    only_new: int

    def of_kind(self, kind: str) -> list[Change]:
        """The changes of one kind, largest first."""
        found = [change for change in self.changes if change.kind == kind]
        return sorted(found, key=lambda change: abs(change.ratio - 1), reverse=True)

    @property
    def is_regression(self) -> bool:
        return bool(self.of_kind("slower") or self.of_kind("wrong"))


def compare_runs(old: Run, new: Run, threshold: float = THRESHOLD) -> Comparison:
    """Match rows by what was measured; a threshold of 0.1 ignores changes below 10%."""
    was, now = (run.settings.get("device", "cpu") for run in (old, new))
    if was != now:
        raise UnisonoError(f"the old run measured tensors on {was}, the new one on {now}")
    before = {row.key: row for row in old.rows}
    after = {row.key: row for row in new.in_order}
    changes = [Change(before[key], row, threshold) for key, row in after.items() if key in before]
    return Comparison(changes, len(before.keys() - after.keys()), len(after.keys() - before.keys()))


def lines(comparison: Comparison) -> list[str]:
    """The comparison as text: what changed first, then how many did not."""
    found = []
    for kind in ("wrong", "slower", "faster"):
        found += [f"{kind:7} {describe_change(change)}" for change in comparison.of_kind(kind)]
    noise, same = comparison.of_kind("noise"), comparison.of_kind("same")
    found.append(
        f"{len(comparison.changes)} rows in both: {len(comparison.of_kind('slower'))} slower, "
        f"{len(comparison.of_kind('faster'))} faster, {len(same)} the same, "
        f"{len(noise)} within the spread of their samples"
    )
    if comparison.changes:
        mean = geometric_mean([change.ratio for change in comparison.changes])
        found.append(f"geometric mean of new / old: {mean:.3f}")
    if comparison.only_old or comparison.only_new:
        old, new = comparison.only_old, comparison.only_new
        found.append(f"{old} rows are only in the old run, {new} only in the new")
    return found


def describe_change(change: Change) -> str:
    row = change.new
    disturbed = " (disturbed by other programs)" if change.disturbed else ""
    times = f"{text.time_text(change.old.time_us.p50)} -> {text.time_text(row.time_us.p50)} us"
    wrong = f", {row.wrong} wrong elements" if row.wrong else ""
    what = f"{row.collective} {text.size_text(row.size_bytes)} {row.backend}"
    return f"{what}: {times}, {change.ratio:.2f}x{wrong}{disturbed}"
