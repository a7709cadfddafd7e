"""`unisono plan`: which algorithm, how fast, and what it looks like."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from unisono.misuse import Misuse
from unisono.wording import name_number

if TYPE_CHECKING:
    from rich.console import Console

    from unisono.plan import Schedule, Topology


@click.command()
@click.argument("what", required=False)
@click.argument("name", required=False)
@click.option("-n", "--ranks", type=int, default=8, show_default=True, help="How many ranks.")
@click.option("--nodes", type=int, help="On how many nodes.  [default: as the topology has them]")
@click.option("--size", metavar="SIZE", default="64M", show_default=True, help="The tensor.")
@click.option("--sizes", metavar="FROM:TO", help="Draw time against size, like 8:1G.")
@click.option(
    "--topology",
    metavar="NAME",
    default="h100",
    show_default=True,
    help="a100, h100, summit, ethernet, or a .toml file.",
)
@click.option("--table", is_flag=True, help="Steps, bytes and time of every algorithm.")
@click.option("--collective", metavar="NAME", help="show: of which collective NAME is meant.")
@click.option("--root", type=int, default=0, help="show: the root, where there is one.")
@click.option("--pieces", type=int, help="show: how many pieces, where there are any.")
@click.option("--json", "as_json", is_flag=True, help="show: the schedule as JSON.")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the drawing (.svg), or the chart of --sizes (.svg, .png).",
)
def plan(
    what: str | None,
    name: str | None,
    ranks: int,
    nodes: int | None,
    size: str,
    sizes: str | None,
    topology: str,
    table: bool,
    collective: str | None,
    root: int,
    pieces: int | None,
    as_json: bool,
    output: Path | None,
) -> None:
    """Compare the algorithms of a collective, or show one.

    \b
      unisono plan all_reduce -n 4096 --nodes 512 --size 64M --topology h100
      unisono plan all_reduce -n 64 --sizes 8:1G -o crossover.png
      unisono plan show double_tree -n 8 -o double_tree.svg
      unisono plan --table -n 8

    The first two simulate every algorithm on a cluster: nothing has to be there for it. Sizes are
    of the whole tensor: 8, 64K, 64M, 1G (K is 1,024 bytes).
    """
    from rich.console import Console

    from unisono.plan import COLLECTIVES, find_topology

    console = Console(highlight=False)
    try:
        if output is not None and not output.resolve().parent.is_dir():
            raise ValueError(f"the folder of {output} does not exist")
        if ranks < 1:
            raise ValueError(f"-n must be at least 1, not {ranks}")
        if table:
            _table(console, ranks, what, nodes)
        elif what == "show":
            schedule = _named(name, collective, ranks, nodes, root, pieces)
            _show(console, schedule, as_json, output)
        elif what in COLLECTIVES:
            if name is not None:
                raise ValueError(f"to see {name}, write: unisono plan show {name}")
            cluster = find_topology(topology)
            if nodes is not None:
                cluster = cluster.with_nodes_of(_node_size(ranks, nodes))
            if sizes is None:
                _rank(console, what, ranks, size, cluster)
            else:
                _sweep(console, what, ranks, sizes, cluster, output)
        else:
            asked = "say what to plan" if what is None else f"cannot plan {what!r}"
            raise ValueError(f"{asked}: {', '.join(COLLECTIVES)}, show ALGORITHM, or --table")
    except (ValueError, RuntimeError, OSError) as error:
        raise Misuse(str(error)) from error


def _node_size(ranks: int, nodes: int) -> int:
    if not 1 <= nodes <= ranks or ranks % nodes:
        raise ValueError(f"{ranks} ranks do not fill {nodes} nodes evenly")
    return ranks // nodes


def _rank(console: Console, collective: str, ranks: int, size: str, topology: Topology) -> None:
    from rich.table import Table

    from unisono.plan import explain, rank_algorithms
    from unisono.plan.algorithms import sharp
    from unisono.plan.sizes import format_seconds, format_size, parse_size

    total = parse_size(size)
    with console.status(f"simulating {ranks:,} ranks"):
        ranking = rank_algorithms(collective, ranks, total, topology)
        why = explain(ranking)
    table = Table("", "algorithm", "time", "steps", "busiest rank sends", title=None)
    for column in (2, 3, 4):
        table.columns[column].justify = "right"
    for number, choice in enumerate(ranking.choices, 1):
        schedule = choice.schedule
        sent = float(schedule.chunks_sent().max()) * schedule.chunk_bytes(total)
        table.add_row(
            str(number),
            choice.label,
            format_seconds(choice.time_s),
            f"{schedule.rounds:,}",
            format_size(sent),
        )
    console.print(_where(collective, ranks, topology, format_size(total)))
    console.print(table)
    if collective == "all_reduce" and topology.nodes(ranks) > 1:
        seconds = sharp.all_reduce_s(ranks, total, topology)
        console.print(f"In-network reduction (SHARP), by formula: {format_seconds(seconds)}.")
    console.print(why)
    for name, reason in ranking.left_out:
        console.print(f"Left out: {name}, {reason}.")


def _sweep(
    console: Console,
    collective: str,
    ranks: int,
    sizes: str,
    topology: Topology,
    output: Path | None,
) -> None:
    from unisono.plan.chart import crossovers, save_chart, series, text_chart
    from unisono.plan.choose import rank_sizes
    from unisono.plan.sizes import format_size, parse_sizes

    wanted = parse_sizes(sizes)
    if len(wanted) < 2 or wanted[0] < 1:
        raise ValueError(f"--sizes needs a range from 1 byte on, like 8:1G, not {sizes!r}")
    with console.status(f"simulating {ranks:,} ranks and {len(wanted)} sizes"):
        rankings = rank_sizes(collective, ranks, wanted, topology)
    if not any(rankings[0].best.schedule.phases):
        console.print("One rank has nothing to move.")
        return
    times = series(rankings)
    title = _where(collective, ranks, topology)
    console.print(title)
    chart = text_chart(wanted, times, width=max(20, min(72, console.width - 12)))
    console.print(chart, markup=False)
    for first, last, name in crossovers(rankings):
        console.print(f"{format_size(first):>6} to {format_size(last):>5}: {name}")
    for name, reason in rankings[0].left_out:
        console.print(f"Left out: {name}, {reason}.")
    if output is not None:
        save_chart(output, wanted, times, title)
        console.print(f"Wrote {output}.")


def _where(collective: str, ranks: int, topology: Topology, size: str = "") -> str:
    of = f" of {size}" if size else ""
    nodes = name_number(topology.nodes(ranks), "node")
    return f"{collective}{of} on {name_number(ranks, 'rank')}, {nodes}, {topology.name}"


def _table(console: Console, ranks: int, collective: str | None, nodes: int | None) -> None:
    from rich import box
    from rich.table import Table

    from unisono.plan import costs

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
    for heading in ("collective", "algorithm"):
        table.add_column(heading, no_wrap=True)
    for heading in ("steps", "sent", "by all", "alpha", "beta", "gamma"):
        table.add_column(heading, justify="right", no_wrap=True)
    options = {} if nodes is None else {"node_size": _node_size(ranks, nodes)}
    before = ""
    for cost in costs(ranks, collective, **options):
        entry = cost.algorithm
        if before not in ("", entry.collective):
            table.add_section()
        table.add_row(
            "" if entry.collective == before else entry.collective,
            entry.name,
            f"{cost.steps:,}",
            *(
                f"{value:.4g}"
                for value in (cost.most_sent, cost.total_sent, cost.alpha, cost.beta, cost.gamma)
            ),
        )
        before = entry.collective
    console.print(f"{name_number(ranks, 'rank')}, computed from the schedules")
    console.print(table)
    console.print(
        "Sent: by the busiest rank and by all, in units of the tensor. Time: alpha times what a "
        "message costs, beta times a tensor on a port, gamma times adding a tensor."
    )


def _named(
    name: str | None,
    collective: str | None,
    ranks: int,
    nodes: int | None,
    root: int,
    pieces: int | None,
) -> Schedule:
    from unisono.plan import catalog

    entries = [entry for entry in catalog(collective) if entry.name == name]
    if not entries:
        known = ", ".join(dict.fromkeys(entry.name for entry in catalog(collective)))
        asked = "say which algorithm" if name is None else f"there is no algorithm {name!r}"
        raise ValueError(f"{asked}: {known}")
    options = {"root": root, "node_size": 1 if nodes is None else _node_size(ranks, nodes)}
    if pieces is not None:
        options["pieces"] = pieces
    return entries[0].schedule(ranks, **options)


def _show(console: Console, schedule: Schedule, as_json: bool, output: Path | None) -> None:
    from rich.table import Table

    from unisono.plan import verify
    from unisono.plan.draw import table_rows, to_svg

    if output is not None and output.suffix != ".svg":
        raise ValueError(f"a schedule is drawn as .svg, not {output.name}")
    if as_json:
        click.echo(schedule.to_json())
    else:
        verify(schedule)
        console.print(f"{schedule.title()}; verified")
        if schedule.ranks > 32:
            console.print("There is room for 32 ranks here; --json writes every transfer.")
        elif 9 * schedule.ranks + 8 <= console.width:
            table = Table("step", *(f"rank {rank}" for rank in range(schedule.ranks)))
            for number, row in enumerate(table_rows(schedule)):
                table.add_row(str(number), *row)
            console.print(table)
            console.print(">1 c2: sends chunk 2 to rank 1.  <3 c0: gets it.  +<3 c0: adds it.")
        else:
            table = Table("step", "transfers")
            for number, step in enumerate(schedule.steps):
                table.add_row(str(number), str(step))
            console.print(table)
            console.print("0 -> 1 c2: rank 1 gets chunk 2 from rank 0.  0 +> 1 c2: and adds it.")
    if output is not None:
        output.write_text(to_svg(schedule))
        console.print(f"Wrote {output}.")
