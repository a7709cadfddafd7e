"""`unisono plan`: which algorithm, how fast, and what it looks like."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from unisono.errors import Misuse, name_choices, name_number

if TYPE_CHECKING:
    from rich.console import Console

    from unisono.plan import Algorithm, Schedule, Topology

_QUIET_S = 5.0
"""How often somebody who is not at a terminal hears of progress."""


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
    help="a100, h100, summit, ethernet, a100_sharp, h100_sharp (switches add), or a .toml file.",
)
@click.option("--table", is_flag=True, help="Steps, bytes and time of every algorithm.")
@click.option("--collective", metavar="NAME", help="show: of which collective NAME is meant.")
@click.option("--root", type=int, default=0, help="show: the root, where there is one.")
@click.option("--pieces", type=int, help="In how many pieces, where there are any.")
@click.option("--json", "as_json", is_flag=True, help="The same for programs, as JSON.")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the drawing (.svg), or the chart of --sizes (.svg, .png).",
)
@click.option(
    "--algorithm", metavar="NAME", help="This one alone.  [default: all; --html: the fastest]"
)
@click.option("--against", metavar="NAME", help="Another one beside --algorithm.")
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write a page on which the algorithm plays, in any browser.",
)
@click.pass_context
def plan(
    context: click.Context,
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
    algorithm: str | None,
    against: str | None,
    html: Path | None,
) -> None:
    """Compare the algorithms of a collective, or show one.

    \b
      unisono plan all_reduce -n 4096 --nodes 512 --size 64M --topology h100
      unisono plan all_reduce -n 64 --sizes 8:1G -o crossover.png
      unisono plan all_reduce -n 512 --topology ethernet --algorithm lanes --against ring
      unisono plan show double_tree -n 8 -o double_tree.svg
      unisono plan all_reduce -n 8 --algorithm ring --against double_tree --html play.html
      unisono plan --table -n 8

    The first three simulate algorithms on a cluster: nothing has to be there for it. Sizes are
    of the whole tensor: 8, 64K, 64M, 1G (K is 1,024 bytes).
    """
    from rich.console import Console

    from unisono.plan import COLLECTIVES, find_topology

    console = Console(highlight=False)
    given = _given_options(context)
    try:
        for file in (output, html):
            if file is not None and not file.resolve().parent.is_dir():
                raise ValueError(f"the folder of {file} does not exist")
        if against and not algorithm and html is None:
            raise ValueError("--against goes with --algorithm")
        if ranks < 1:
            raise ValueError(f"-n must be at least 1, not {ranks}")
        cluster = find_topology(topology)
        if nodes is not None:
            cluster = cluster.with_nodes_of(_node_size(ranks, nodes))
        if table:
            _refuse_others(given, "--table", "--nodes", "--topology", "--pieces", "--collective")
            if name is not None or (what is not None and collective is not None):
                raise ValueError("--table shows all algorithms, of one collective at most")
            _table(console, ranks, what or collective, cluster, pieces, as_json)
        elif what == "show":
            _refuse_others(
                given, "show", "--nodes", "--topology", "--collective", "--root", "--pieces",
                "--output",
            )  # fmt: skip
            entry = _named(name, collective, given & {"--root", "--pieces", "--nodes"})
            if "--topology" in given and "node_size" not in entry.options:
                raise ValueError(
                    f"{entry.name} is the same on every topology: leave out --topology"
                )
            schedule = _schedule(entry, ranks, cluster, root, pieces)
            _show(console, schedule, as_json, output)
        elif what in COLLECTIVES:
            if name is not None:
                raise ValueError(f"to see {name}, write: unisono plan show {name}")
            if html is not None:
                _refuse_others(
                    given, "--html", "--nodes", "--topology", "--size", "--root", "--pieces",
                    "--algorithm", "--against", "--html",
                )  # fmt: skip
                _play(console, what, ranks, (algorithm, against), size, cluster, root, pieces, html)
                return
            known = ["--nodes", "--topology", "--algorithm", "--against"]
            known += ["--pieces"] if algorithm else []
            wanted = _Wanted.of(algorithm, against, pieces)
            if sizes is None:
                _refuse_others(given, "a ranking", "--size", *known)
                _rank(console, what, ranks, size, cluster, wanted, as_json)
            else:
                _refuse_others(given, "--sizes", "--output", *known)
                _sweep(console, what, ranks, sizes, cluster, wanted, output, as_json)
        else:
            asked = "say what to plan" if what is None else f"cannot plan {what!r}"
            choices = name_choices((*COLLECTIVES, "show ALGORITHM", "--table"), what)
            raise ValueError(f"{asked}: {choices}")
    except (ValueError, RuntimeError, OSError) as error:
        raise Misuse(str(error)) from error


# -- what was asked ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Wanted:
    """Which algorithms to rank, none for all, and in how many pieces to cut."""

    names: tuple[str, ...]
    pieces: tuple[int, ...]

    @classmethod
    def of(cls, algorithm: str | None, against: str | None, pieces: int | None) -> _Wanted:
        from unisono.plan.choose import PIECES

        names = tuple(name for name in (algorithm, against) if name is not None)
        return cls(names, PIECES if pieces is None else (pieces,))


def _given_options(context: click.Context) -> set[str]:
    """The options that stand on the command line, by their long names."""
    from click.core import ParameterSource

    return {
        parameter.opts[-1]
        for parameter in context.command.params
        if isinstance(parameter, click.Option)
        and context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
    }


def _refuse_others(given: set[str], kind: str, *known: str) -> None:
    """Refuse options that would have no effect."""
    others = sorted(given - {"--ranks", "--json", "--table", "--sizes", *known})
    if kind != "--sizes" and "--sizes" in given:
        others.append("--sizes")
    if others:
        effect = "has no effect" if len(others) == 1 else "have no effect"
        raise ValueError(f"{' and '.join(others)} {effect} on {kind}: leave it out")


def _node_size(ranks: int, nodes: int) -> int:
    if not 1 <= nodes <= ranks or ranks % nodes:
        raise ValueError(f"{ranks} ranks do not fill {nodes} nodes evenly")
    return ranks // nodes


def _named(name: str | None, collective: str | None, wanted: set[str]) -> Algorithm:
    """The algorithm of that name that takes what was asked for."""
    from unisono.plan import catalog, find
    from unisono.plan.catalog import RENAMED
    from unisono.plan.schedule import COLLECTIVES

    for known in COLLECTIVES if collective is None else (collective,):
        if name is not None and (known, name.casefold()) in RENAMED:
            name = find(known, name).name
    entries = [e for e in catalog(collective) if name and e.name.casefold() == name.casefold()]
    if not entries:
        choices = name_choices(dict.fromkeys(entry.name for entry in catalog(collective)), name)
        asked = "say which algorithm" if name is None else f"there is no algorithm {name!r}"
        raise ValueError(f"{asked}: {choices}")
    names = {"--root": "root", "--pieces": "pieces", "--nodes": "node_size"}
    for entry in entries:
        if all(names[option] in entry.options for option in wanted):
            return entry
    lacking = next(o for o in sorted(wanted) if names[o] not in entries[0].options)
    what = f"{entries[0].collective} by {name}"
    raise ValueError(f"{what} has no {lacking.removeprefix('--')}: leave out {lacking}")


def _schedule(
    entry: Algorithm, ranks: int, topology: Topology, root: int, pieces: int | None
) -> Schedule:
    options = {"root": root, "node_size": min(topology.node_size, ranks)}
    if pieces is not None:
        options["pieces"] = pieces
    try:
        return entry.schedule(ranks, **options)
    except ValueError as error:
        if "node_size" in entry.options and ranks % options["node_size"]:
            raise ValueError(f"{error}: --nodes says how many there are") from error
        raise


def _play(
    console: Console,
    collective: str,
    ranks: int,
    names: tuple[str | None, str | None],
    size: str,
    topology: Topology,
    root: int,
    pieces: int | None,
    path: Path,
) -> None:
    from unisono.plan import find, rank_algorithms, verify
    from unisono.plan.player import schedule_page
    from unisono.plan.sizes import parse_size

    total = parse_size(size)
    chosen = []
    for number, name in enumerate(names):
        if name is None and number == 0:
            best = rank_algorithms(collective, ranks, total, topology).best
            name, pieces = best.algorithm.name, pieces or best.pieces
        if name is not None:
            schedule = _schedule(find(collective, name), ranks, topology, root, pieces)
            verify(schedule)
            chosen.append(schedule)
    path.write_text(schedule_page(chosen, topology, total), encoding="utf-8")
    for schedule in chosen:
        console.print(f"{schedule.title()}; verified")
    console.print(f"Wrote {path}.")


# -- what is shown -------------------------------------------------------------------------------


@contextmanager
def _progress(what: str) -> Iterator[Callable[[str], None]]:
    """Say on stderr what is being done: a spinner on a terminal, else a line now and then."""
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(what) as status:
            yield lambda text: status.update(f"{what}: {text}")
        return
    said = [time.monotonic()]

    def say(text: str) -> None:
        if time.monotonic() - said[0] > _QUIET_S:
            said[0] = time.monotonic()
            click.echo(f"{what}: {text}", err=True)

    yield say


def _print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2))


def _rank(
    console: Console,
    collective: str,
    ranks: int,
    size: str,
    topology: Topology,
    wanted: _Wanted,
    as_json: bool,
) -> None:
    from unisono.plan import explain
    from unisono.plan.choose import rank_sizes
    from unisono.plan.sizes import format_seconds, parse_size
    from unisono.plan.tables import print_table, ranking_as_json, ranking_table, where

    total = parse_size(size)
    with _progress(f"simulating {ranks:,} ranks") as say:
        (ranking,) = rank_sizes(
            collective, ranks, (total,), topology, say, wanted.names, wanted.pieces
        )
        say("why the fastest is")
        why = explain(ranking)
    if as_json:
        _print_json(ranking_as_json(ranking) | {"why": why})
        return
    console.print(where(ranking))
    print_table(console, ranking_table(ranking))
    if ranking.in_network is not None and ranking.in_network.time_s < ranking.best.time_s:
        factor = ranking.best.time_s / ranking.in_network.time_s
        console.print(f"The switches (sharp) are {factor:.3g} times as fast as the ranks alone.")
    console.print(why)
    by_switches = _by_switches_s(collective, ranks, total, topology)
    if by_switches is not None:
        console.print(
            f"With switches that add (SHARP, --topology {topology.name}_sharp): "
            f"{format_seconds(by_switches)}."
        )
    for name, reason in ranking.left_out:
        console.print(f"Left out: {name}, {reason}.")


def _by_switches_s(collective: str, ranks: int, total: int, topology: Topology) -> float | None:
    """What the same machines would take with switches that reduce, where there is such a preset."""
    from unisono.plan import PRESETS
    from unisono.plan.in_network import reduce_in_network

    reducing = PRESETS.get(f"{topology.name}_sharp")
    if collective != "all_reduce" or topology.nodes(ranks) == 1 or reducing is None:
        return None
    return reduce_in_network(ranks, reducing.with_nodes_of(topology.node_size), total).time_s


def _sweep(
    console: Console,
    collective: str,
    ranks: int,
    sizes: str,
    topology: Topology,
    wanted: _Wanted,
    output: Path | None,
    as_json: bool,
) -> None:
    from unisono.plan.chart import check_chart, crossovers, save_chart, series, text_chart
    from unisono.plan.choose import rank_sizes
    from unisono.plan.sizes import format_size, parse_sizes
    from unisono.plan.tables import ranking_as_json, where

    to_rank = parse_sizes(sizes)
    if len(to_rank) < 2 or to_rank[0] < 1:
        raise ValueError(f"--sizes needs a range from 1 byte on, like 8:1G, not {sizes!r}")
    if output is not None:
        check_chart(output)
    with _progress(f"simulating {ranks:,} ranks") as say:
        rankings = rank_sizes(
            collective, ranks, to_rank, topology, say, wanted.names, wanted.pieces
        )
    if as_json:
        _print_json([ranking_as_json(ranking) for ranking in rankings])
    if not any(rankings[0].best.schedule.phases):
        if not as_json:
            console.print("One rank has nothing to move.")
        return
    times = series(rankings)
    title = where(rankings[0], with_size=False)
    if not as_json:
        console.print(title)
        chart = text_chart(to_rank, times, width=max(20, min(72, console.width - 12)))
        console.print(chart, markup=False)
        for first, last, name in crossovers(rankings):
            console.print(f"{format_size(first):>6} to {format_size(last):>5}: {name}")
        for name, reason in rankings[0].left_out:
            console.print(f"Left out: {name}, {reason}.")
    if output is not None:
        save_chart(output, to_rank, times, title)
        click.echo(f"Wrote {output}.", err=as_json)


def _table(
    console: Console,
    ranks: int,
    collective: str | None,
    topology: Topology,
    pieces: int | None,
    as_json: bool,
) -> None:
    from unisono.plan import costs
    from unisono.plan.choose import left_out
    from unisono.plan.tables import costs_as_json, costs_table, print_table

    options = {"node_size": min(topology.node_size, ranks)}
    if pieces is not None:
        options["pieces"] = pieces
    found = costs(ranks, collective, **options)
    if as_json:
        _print_json(costs_as_json(found))
        return
    console.print(f"{name_number(ranks, 'rank')}, computed from the schedules")
    print_table(console, costs_table(found))
    console.print(
        "Sent: by the busiest rank and by all, in units of the tensor. Time: alpha times what a "
        "message costs, beta times a tensor on a port, gamma times adding a tensor."
    )
    for name, reason in left_out(ranks, collective, options["node_size"]):
        console.print(f"Left out: {name}, {reason}.")


def _show(console: Console, schedule: Schedule, as_json: bool, output: Path | None) -> None:
    from unisono.plan import verify
    from unisono.plan.draw import to_svg
    from unisono.plan.tables import fits, print_table, ranks_table, transfers_table

    if output is not None and output.suffix != ".svg":
        raise ValueError(f"a schedule is drawn as .svg, not {output.name}")
    drawing = None if output is None else to_svg(schedule)
    if as_json:
        click.echo(schedule.to_json())
    else:
        verify(schedule)
        console.print(f"{schedule.title()}; verified")
        if schedule.ranks > 32:
            console.print("There is room for 32 ranks here; --json writes every transfer.")
        elif fits(console, table := ranks_table(schedule)):
            print_table(console, table)
            console.print(">1 c2: sends chunk 2 to rank 1.  <3 c0: gets it.  +<3 c0: adds it.")
        else:
            console.print(transfers_table(schedule))
            console.print("0 -> 1 c2: rank 1 gets chunk 2 from rank 0.  0 +> 1 c2: and adds it.")
    if output is not None and drawing is not None:
        output.write_text(drawing)
        click.echo(f"Wrote {output}.", err=as_json)
