"""The tables and charts of `unisono plan`, and the same as JSON."""

from collections.abc import Mapping, Sequence
from itertools import chain, groupby, repeat
from pathlib import Path
from typing import Any

from rich.table import Table

from unisono.errors import name_number
from unisono.plan.choose import Ranking
from unisono.plan.complexity import Cost
from unisono.plan.sizes import format_seconds, format_size
from unisono.show import charts
from unisono.show.table import LINED, build_table

Series = Mapping[str, Sequence[float]]  # for each algorithm, the seconds at each x


def where(ranking: Ranking, with_size: bool = True) -> str:
    of = f" of {format_size(ranking.total_bytes)}" if with_size else ""
    ranks, topology = ranking.ranks, ranking.topology
    nodes = name_number(topology.nodes(ranks), "node")
    return f"{ranking.collective}{of} on {name_number(ranks, 'rank')}, {nodes}, {topology.name}"


def ranking_table(ranking: Ranking) -> Table:
    """The algorithms, the fastest first; then, without a number, those that can only be planned."""
    rows = [
        (
            *(bool(each.algorithm.only_planned), each.time_s, each.label),
            *(f"{each.schedule.rounds:,}", each.busiest_rank_sends_bytes),
        )
        for each in ranking.choices
    ]
    headings = ("<", "<algorithm", ">time", ">steps", ">busiest rank sends")
    cells = (
        ("-" if planned else str(number), label, format_seconds(time_s), steps, format_size(sent))
        for number, (planned, time_s, label, steps, sent) in enumerate(sorted(rows), 1)
    )
    return build_table(headings, cells, **LINED)


def ranking_as_json(ranking: Ranking) -> dict[str, Any]:
    return {
        "collective": ranking.collective,
        "ranks": ranking.ranks,
        "nodes": ranking.topology.nodes(ranking.ranks),
        "topology": ranking.topology.name,
        "bytes": ranking.total_bytes,
        "algorithms": [
            {"algorithm": choice.algorithm.name}
            | _fields(choice, "pieces channels time_s")
            | {"steps": choice.schedule.rounds}
            | _fields(choice, "busiest_rank_sends_bytes")
            | _fields(choice.algorithm, "only_planned")
            for choice in ranking.choices
        ],
        "left_out": dict(ranking.left_out),
    }


def costs_table(costs: Sequence[Cost]) -> Table:
    rows: list[tuple[str, ...]] = []
    for collective, found in groupby(costs, lambda cost: cost.algorithm.collective):
        rows += [()] if rows else []
        names = chain([collective], repeat(""))
        for name, cost in zip(names, found, strict=False):
            values = (cost.most_sent, cost.total_sent, cost.alpha, cost.beta, cost.gamma)
            figures = (f"{cost.steps:,}", *(f"{value:.4g}" for value in values))
            rows.append((name, cost.algorithm.name, *figures))
    headings = (">steps", ">sent", ">by all", ">alpha", ">beta", ">gamma")
    return build_table(("<collective", "<algorithm", *headings), rows, **LINED)


def costs_as_json(costs: Sequence[Cost]) -> list[dict[str, Any]]:
    return [
        _fields(cost.algorithm, "collective")
        | {"algorithm": cost.algorithm.name}
        | _fields(cost, "ranks steps most_sent total_sent alpha beta gamma")
        for cost in costs
    ]


def _fields(value: object, names: str) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names.split()}


# -- charts, by matplotlib -------------------------------------------------------------------------


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
    return {name: [ranking.times_s[name] for ranking in rankings] for name in rankings[0].times_s}


def check_chart(path: Path) -> None:
    """Raise ValueError or RuntimeError, before any work is done, if the chart cannot be written."""
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"cannot write a chart to {path.name}: give -o a .png or .svg file")
    if not charts.is_available():
        needs = f"needs matplotlib: {charts.INSTALL}"
        raise RuntimeError(f"the chart {path.name} {needs}, or leave out -o")


def save_chart(
    path: Path, x: Sequence[float], times: Series, title: str, x_label: str = "bytes"
) -> None:
    """Write a PNG or SVG file, by the suffix of `path`. Raises what `check_chart` raises."""
    check_chart(path)
    with charts.figure((8, 5)) as figure:
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
        charts.save(figure, path, dpi=120)
