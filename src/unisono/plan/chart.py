"""Time against size or against ranks, for several algorithms: as PNG or SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from unisono.plan.choose import Ranking
from unisono.plan.sizes import format_size

Series = Mapping[str, Sequence[float]]  # by algorithm, the seconds at each x


def crossovers(rankings: Sequence[Ranking]) -> list[tuple[int, int, str]]:
    """The fastest algorithm from one size to another: (first size, last size, name)."""
    spans: list[tuple[int, int, str]] = []
    for ranking in rankings:
        times, size = ranking.times_s, ranking.total_bytes
        name = min(times, key=times.__getitem__)
        first = spans.pop()[0] if spans and spans[-1][2] == name else size
        spans.append((first, size, name))
    return spans


def series(rankings: Sequence[Ranking]) -> dict[str, list[float]]:
    """The times of each algorithm, one for each ranking."""
    return {name: [ranking.times_s[name] for ranking in rankings] for name in rankings[0].times_s}


def check_chart(path: Path) -> None:
    """Whether a chart can be written there, before the work: raises ValueError for an ending other
    than .png and .svg, and RuntimeError if matplotlib is not there."""
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"a chart is written to a .png or .svg file, not {path.name}")
    try:
        import matplotlib  # noqa: F401 - is it there?
    except ImportError as error:
        raise RuntimeError(
            f"the chart {path.name} needs matplotlib: pip install 'unisono[plot]', or leave out -o"
        ) from error


def save_chart(
    path: Path, x: Sequence[float], times: Series, title: str, x_label: str = "bytes"
) -> None:
    """A PNG or SVG file, by the ending of `path`.

    Raises what `check_chart` raises.
    """
    check_chart(path)
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # Text stays text, and the file is the same every time that it is made.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "unisono"}):
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        for marker, (name, values) in zip("osD^vP*Xdh" * 3, times.items(), strict=False):
            axes.plot(x, values, marker=marker, markersize=4, label=name)
        axes.set(xscale="log", yscale="log", xlabel=x_label, ylabel="seconds", title=title)
        if x_label == "bytes":
            axes.set_xscale("log", base=2)
            axes.set_xticks(x[:: max(1, len(x) // 10)])
            axes.set_xticklabels([format_size(size) for size in x[:: max(1, len(x) // 10)]])
        axes.grid(alpha=0.3)
        axes.legend()
        metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
        figure.savefig(path, dpi=120, metadata=metadata)
