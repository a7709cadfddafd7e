"""What `unisono plan` shows as tables, and the same for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from unisono.errors import name_number
from unisono.plan.choose import Ranking
from unisono.plan.complexity import Cost
from unisono.plan.sizes import format_seconds, format_size


def where(ranking: Ranking, with_size: bool = True) -> str:
    """What was simulated, and on what."""
    of = f" of {format_size(ranking.total_bytes)}" if with_size else ""
    ranks, topology = ranking.ranks, ranking.topology
    nodes = name_number(topology.nodes(ranks), "node")
    return f"{ranking.collective}{of} on {name_number(ranks, 'rank')}, {nodes}, {topology.name}"


def ranking_table(ranking: Ranking) -> Table:
    """The algorithms, the fastest first; among them the switches, where they add."""
    rows = [
        (
            choice.time_s,
            choice.label,
            f"{choice.schedule.rounds:,}",
            choice.busiest_rank_sends_bytes,
        )
        for choice in ranking.choices
    ]
    if ranking.in_network is not None:
        by_switches = ranking.in_network
        steps = f"{2 * by_switches.levels + 2} hops"
        rows.append((by_switches.time_s, by_switches.label, steps, by_switches.rank_bytes))
    table = _table("", "algorithm", "time", "steps", "busiest rank sends", left=2)
    for number, (time_s, label, steps, sent) in enumerate(sorted(rows), 1):
        table.add_row(str(number), label, format_seconds(time_s), steps, format_size(sent))
    return table


def ranking_as_json(ranking: Ranking) -> dict[str, Any]:
    """The same as plain values; times in seconds, sizes in bytes."""
    by_switches = ranking.in_network
    return {
        "collective": ranking.collective,
        "ranks": ranking.ranks,
        "nodes": ranking.topology.nodes(ranking.ranks),
        "topology": ranking.topology.name,
        "bytes": ranking.total_bytes,
        "algorithms": [
            {
                "algorithm": choice.algorithm.name,
                "pieces": choice.pieces,
                "time_s": choice.time_s,
                "steps": choice.schedule.rounds,
                "busiest_rank_sends_bytes": choice.busiest_rank_sends_bytes,
            }
            for choice in ranking.choices
        ],
        "in_network": None
        if by_switches is None
        else {
            "time_s": by_switches.time_s,
            "pieces": by_switches.pieces,
            "levels": by_switches.levels,
            "switches": by_switches.switches,
            "busiest_rank_sends_bytes": by_switches.rank_bytes,
        },
        "left_out": dict(ranking.left_out),
    }


def costs_table(costs: Sequence[Cost]) -> Table:
    """Steps, bytes and time of every algorithm."""
    headings = ("steps", "sent", "by all", "alpha", "beta", "gamma")
    table = _table("collective", "algorithm", *headings, left=2)
    before = ""
    for cost in costs:
        entry = cost.algorithm
        if before not in ("", entry.collective):
            table.add_section()
        values = (cost.most_sent, cost.total_sent, cost.alpha, cost.beta, cost.gamma)
        table.add_row(
            "" if entry.collective == before else entry.collective,
            entry.name,
            f"{cost.steps:,}",
            *(f"{value:.4g}" for value in values),
        )
        before = entry.collective
    return table


def costs_as_json(costs: Sequence[Cost]) -> list[dict[str, Any]]:
    """The same as plain values, in units of the tensor."""
    names = ("ranks", "steps", "most_sent", "total_sent", "alpha", "beta", "gamma")
    return [
        {"collective": cost.algorithm.collective, "algorithm": cost.algorithm.name}
        | {name: getattr(cost, name) for name in names}
        for cost in costs
    ]


def print_table(console: Console, table: Table) -> None:
    """With all figures: a table that is wider than the terminal, or the page, stays so."""
    any_width = console.options.update(max_width=10_000)
    width = max(console.width, Measurement.get(console, any_width, table).maximum)
    Console(file=console.file, highlight=False, width=width).print(table)


def _table(*headings: str, left: int) -> Table:
    """A narrow table; the first `left` columns are names, the others figures."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < left else "right", no_wrap=True)
    return table
