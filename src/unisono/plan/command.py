"""`unisono plan`: which algorithm is fastest, how fast, and what it looks like."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console

from unisono.errors import Misuse, name_choices, name_number
from unisono.output_files import write_text
from unisono.plan import tables
from unisono.plan.catalog import Algorithm, catalog, find
from unisono.plan.choose import PIECES, Choice, Ranking, explain, rank_algorithms, rank_sizes
from unisono.plan.complexity import costs_and_left_out
from unisono.plan.draw import to_svg
from unisono.plan.player import schedule_page
from unisono.plan.progress import show_progress
from unisono.plan.proof import verify
from unisono.plan.schedule import COLLECTIVES, Schedule
from unisono.plan.sizes import format_size, parse_size, parse_sizes
from unisono.plan.topology import Topology, find_topology
from unisono.show.table import print_whole, to_json


@click.command()
@click.argument("what", required=False)
@click.argument("name", required=False)
@click.option("-n", "--ranks", type=int, default=8, show_default=True, help="How many ranks.")
@click.option("--nodes", type=int, help="How many nodes.  [default: as in the topology]")
@click.option("--size", metavar="SIZE", default="64M", show_default=True, help="The tensor's size.")
@click.option("--sizes", metavar="FROM:TO", help="Show the fastest for each size, as in 8:1G.")
@click.option(
    "--topology",
    metavar="NAME",
    default="h100",
    show_default=True,
    help="a100, h100, summit, ethernet, or a .toml file.",
)
@click.option("--table", is_flag=True, help="Show steps, bytes and time of every algorithm.")
@click.option("--collective", metavar="NAME", help="show: the collective that NAME is for.")
@click.option("--root", type=int, default=0, help="show: the root rank.")
@click.option("--pieces", type=int, help="Cut the tensor into this many pieces.")
@click.option(
    "--channels",
    type=int,
    help="How many rings or trees run at once.  [default: the best; show: one per card]",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the drawing (.svg), or the chart of --sizes (.svg, .png).",
)
@click.option(
    "--algorithm", metavar="NAME", help="Only this one.  [default: all; --html: the fastest]"
)
@click.option("--against", metavar="NAME", help="Compare --algorithm with this one.")
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write an HTML page that animates the algorithm.",
)
@click.pass_context
def plan(context: click.Context, /, **options: Any) -> None:
    """Compare the algorithms of a collective, or show one.

    \b
      unisono plan all_reduce -n 4096 --nodes 512 --size 64M --topology h100
      unisono plan all_reduce -n 64 --sizes 8:1G -o crossover.png
      unisono plan all_reduce -n 512 --topology ethernet --algorithm lanes --against ring
      unisono plan show double_tree -n 8 -o double_tree.svg
      unisono plan all_reduce -n 8 --algorithm ring --against double_tree --html play.html
      unisono plan --table -n 8

    The first three simulate algorithms on a cluster; you need not have one. A size is that of the
    whole tensor: 8, 64K, 64M, 1G (K is 1,024 bytes).
    """
    try:
        _answer(_Request(**options, given=_given_options(context)))
    except (ValueError, RuntimeError, OSError) as error:
        raise Misuse(str(error)) from error


# -- what was asked ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Request:
    """The command line; `given` has the long names of the options that appear on it."""

    what: str | None
    name: str | None
    ranks: int
    nodes: int | None
    size: str
    sizes: str | None
    topology: str
    table: bool
    collective: str | None
    root: int
    pieces: int | None
    channels: int | None
    as_json: bool
    output: Path | None
    algorithm: str | None
    against: str | None
    html: Path | None
    given: frozenset[str]

    def reject_others(self, kind: str, known: str) -> None:
        """Reject options that have no effect on `kind`, all but those that are `known`."""
        always = {"--ranks", "--json", "--nodes", "--topology", kind}
        others = sorted(self.given - always - {f"--{option}" for option in known.split()})
        if others:
            effect = "has no effect" if len(others) == 1 else "have no effect"
            raise ValueError(f"{' and '.join(others)} {effect} on {kind}: leave it out")

    @cached_property
    def cluster(self) -> Topology:
        found = find_topology(self.topology)
        if self.nodes is None:
            return found
        if not 1 <= self.nodes <= self.ranks or self.ranks % self.nodes:
            raise ValueError(f"{self.ranks} ranks do not fill {self.nodes} nodes evenly")
        return found.with_nodes_of(self.ranks // self.nodes)

    @cached_property
    def options(self) -> dict[str, int]:
        """The options of schedules; a channel per card if the command line describes the nodes."""
        found = {"node_size": min(self.cluster.node_size, self.ranks)}
        if self.pieces is not None:
            found["pieces"] = self.pieces
        if self.channels is not None:
            found["channels"] = self.channels
        elif self.given & {"--nodes", "--topology"} and self.ranks % found["node_size"] == 0:
            found["channels"] = self.cluster.rails(self.ranks)
        return found

    def rank(self, sizes: tuple[int, ...], say: Callable[[str], None]) -> list[Ranking]:
        names = [name for name in (self.algorithm, self.against) if name is not None]
        pieces = PIECES if self.pieces is None else (self.pieces,)
        channels = () if self.channels is None else (self.channels,)
        collective = self.what or ""
        return rank_sizes(collective, self.ranks, sizes, self.cluster, say, names, pieces, channels)

    def schedule(self, entry: Algorithm, chosen: Choice | None = None) -> Schedule:
        if chosen and chosen.algorithm is entry and not {"--pieces", "--channels"} & self.given:
            return chosen.schedule
        try:
            return entry.schedule(self.ranks, **{"root": self.root} | self.options)
        except ValueError as error:
            if "node_size" in entry.options and self.ranks % self.options["node_size"]:
                raise ValueError(f"{error}; set the number of nodes with --nodes") from error
            raise


def _given_options(context: click.Context) -> frozenset[str]:
    return frozenset(
        parameter.opts[-1]
        for parameter in context.command.params
        if isinstance(parameter, click.Option)
        and context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
    )


def _answer(request: _Request) -> None:
    console, what = Console(highlight=False), request.what
    for file in (request.output, request.html):
        if file is not None and not file.resolve().parent.is_dir():
            raise ValueError(f"the folder of {file} does not exist")
    if request.against and not request.algorithm and request.html is None:
        raise ValueError("--against needs --algorithm")
    if request.ranks < 1:
        raise ValueError(f"-n must be at least 1, not {request.ranks}")
    pieces = "pieces channels" if request.algorithm else ""
    if request.table:
        request.reject_others("--table", "pieces channels collective")
        if request.name is not None or (what is not None and request.collective is not None):
            raise ValueError("--table shows all algorithms: name one collective at most")
        _table(console, request)
    elif what == "show":
        request.reject_others("show", "collective root pieces channels output")
        _show(console, request)
    elif what not in COLLECTIVES:
        wanted = "name what to plan" if what is None else f"cannot plan {what!r}"
        choices = name_choices((*COLLECTIVES, "show ALGORITHM", "--table"), what)
        raise ValueError(f"{wanted}: {choices}")
    elif request.name is not None:
        raise ValueError(f"to see {request.name}, write: unisono plan show {request.name}")
    elif request.html is not None:
        request.reject_others("--html", "size root pieces channels algorithm against")
        _play(console, request, request.html)
    elif request.sizes is not None:
        request.reject_others("--sizes", f"output algorithm against {pieces}")
        _sweep(console, request, request.sizes)
    else:
        request.reject_others("a ranking", f"size algorithm against {pieces}")
        _rank(console, request)


def _find_named(request: _Request) -> Algorithm:
    """The algorithm of that name that takes the given options."""
    entries = []
    for collective in COLLECTIVES if request.collective is None else (request.collective,):
        with suppress(ValueError):
            entries.append(find(collective, request.name or ""))
    if not entries:
        known = dict.fromkeys(entry.name for entry in catalog(request.collective))
        problem = f"there is no algorithm {request.name!r}" if request.name else "name an algorithm"
        raise ValueError(f"{problem}: {name_choices(known, request.name)}")
    names = {f"--{option}": option for option in ("root", "pieces", "channels")}
    names["--nodes"] = "node_size"
    wanted = sorted(request.given & names.keys())
    for entry in entries:
        if all(names[option] in entry.options for option in wanted):
            return entry
    lacking = next(option for option in wanted if names[option] not in entries[0].options)
    title = f"{entries[0].collective} by {entries[0].name}"
    raise ValueError(f"{title} has no {lacking.removeprefix('--')}: leave out {lacking}")


# -- what is shown -------------------------------------------------------------------------------


def _play(console: Console, request: _Request, path: Path) -> None:
    collective, total = request.what or "", parse_size(request.size)
    name, best = request.algorithm, None
    if name is None:
        best = rank_algorithms(collective, request.ranks, total, request.cluster).best
        name = best.algorithm.name
    names = [name] if request.against is None else [name, request.against]
    chosen = [request.schedule(find(collective, each), best) for each in names]
    for schedule in chosen:
        verify(schedule)
    write_text(path, schedule_page(chosen, request.cluster, total))
    for schedule in chosen:
        console.print(f"{schedule.title()}; verified")
    console.print(f"Wrote {path}.")


def _print_left_out(console: Console, left_out: Iterable[tuple[str, str]]) -> None:
    for name, reason in left_out:
        console.print(f"Left out: {name}, {reason}.")


def _print_unranked(console: Console, ranking: Ranking) -> None:
    for name, reason in ranking.only_planned.items():
        console.print(f"{name} can only be planned, not run: {reason}.")
    _print_left_out(console, ranking.left_out)


def _rank(console: Console, request: _Request) -> None:
    with show_progress(request.ranks) as say:
        (ranking,) = request.rank((parse_size(request.size),), say)
        say("explaining the result")
        why = explain(ranking)
    if request.as_json:
        click.echo(to_json(tables.ranking_as_json(ranking) | {"why": why}))
        return
    console.print(tables.where(ranking))
    print_whole(console, tables.ranking_table(ranking))
    console.print(why)
    _print_unranked(console, ranking)


def _sweep(console: Console, request: _Request, range_of_sizes: str) -> None:
    sizes, output = parse_sizes(range_of_sizes), request.output
    if len(sizes) < 2 or sizes[0] < 1:
        raise ValueError(f"--sizes needs a range from 1 byte on, like 8:1G, not {range_of_sizes!r}")
    if output is not None:
        tables.check_chart(output)
    with show_progress(request.ranks) as say:
        rankings = request.rank(sizes, say)
    title = tables.where(rankings[0], with_size=False)
    if request.as_json:
        click.echo(to_json([tables.ranking_as_json(ranking) for ranking in rankings]))
    else:
        console.print(f"{title}: the fastest algorithm")
        for first, last, name in tables.crossovers(rankings):
            console.print(f"{format_size(first):>6} to {format_size(last):>5}: {name}")
        _print_unranked(console, rankings[0])
    if output is not None:
        tables.save_chart(output, sizes, tables.series(rankings), title)
        click.echo(f"Wrote {output}.", err=request.as_json)


def _table(console: Console, request: _Request) -> None:
    collective = request.what or request.collective
    found, left_out = costs_and_left_out(request.ranks, collective, **request.options)
    if request.as_json:
        click.echo(to_json(tables.costs_as_json(found)))
        return
    console.print(f"{name_number(request.ranks, 'rank')}, computed from the schedules")
    print_whole(console, tables.costs_table(found))
    console.print(
        "Sent: by the busiest rank and by all, in units of the tensor. Time: alpha times what a "
        "message costs, beta times a tensor on a port, gamma times adding a tensor."
    )
    _print_left_out(console, left_out)


def _show(console: Console, request: _Request) -> None:
    entry, output = _find_named(request), request.output
    if "--topology" in request.given and "node_size" not in entry.options:
        raise ValueError(f"{entry.name} is the same on every topology: leave out --topology")
    schedule = request.schedule(entry)
    if output is not None and output.suffix != ".svg":
        raise ValueError(f"cannot draw a schedule to {output.name}: give -o a .svg file")
    drawing = None if output is None else to_svg(schedule)
    if request.as_json:
        click.echo(schedule.to_json())
    else:
        verify(schedule)
        title, *steps = str(schedule).splitlines()
        console.print(f"{title}; verified")
        click.echo("\n".join(steps))
        console.print("0 -> 1 c2: rank 1 gets chunk 2 from rank 0.  0 +> 1 c2: and adds it.")
    if output is not None and drawing is not None:
        write_text(output, drawing)
        click.echo(f"Wrote {output}.", err=request.as_json)
