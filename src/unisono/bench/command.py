"""`unisono bench`: what was asked for, checked before anything runs, and what becomes of it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from unisono.bench.request import DEFAULT_SIZES, DEFAULT_SWEEP, DEVICES, SWEEP_FACTOR
from unisono.errors import Misuse, UnisonoError
from unisono.launcher.command import check_writable

EXAMPLES = """\b
  unisono bench                               the main collectives, against gloo
  unisono bench all_reduce -n 2 --sizes 8:256M --backends unisono,gloo,mpi
  unisono bench all_reduce --sizes 400000000  100 million float32 elements
  unisono bench all_gather broadcast --sizes 1K,1M --place both
  unisono bench all_reduce --dtype bfloat16 --op max --budget 5
  unisono bench --device cuda                 CUDA tensors, also of ranks that share a GPU
  unisono bench --json run.json --csv run.csv --plot run.png --html run.html
  unisono bench compare old.json run.json     exit code 1 if anything became slower
  torchrun --nproc-per-node 8 -m unisono bench all_reduce --backends nccl,gloo
"""


_COMMAND = "unisono.bench.command"


class _MeasureContext(click.Context):
    """The command that measures has no name of its own: see _Bench."""

    @property
    def command_path(self) -> str:
        return super().command_path.rstrip()


class _Measure(click.Command):
    context_class = _MeasureContext


class _Bench(click.Group):
    """`bench compare` compares; everything else measures."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_COMMAND] = shlex.join(["unisono", "bench", *args])
        if args[:1] != ["compare"]:
            args = ["measure", *args]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return "" if name == "measure" else name, command, rest


@click.group(cls=_Bench)
def bench() -> None:
    """Measure collectives on any backend, and say what is normal."""


@bench.command(cls=_Measure, epilog=f"Examples:\n\n{EXAMPLES}")
@click.argument("collectives", nargs=-1)
@click.option("-n", "--ranks", type=click.IntRange(min=1), help="[default: the cores, at least 2]")
@click.option(
    "--sizes",
    metavar="LIST",
    help=f"Bytes: 8,1K,64M or a range 8:256M, by powers of {SWEEP_FACTOR}.  [default: "
    f"{DEFAULT_SIZES}; with COLLECTIVES {DEFAULT_SWEEP}]",
)
@click.option("--step", "factor", type=click.IntRange(min=2), default=SWEEP_FACTOR, hidden=True)
@click.option(
    "--backends",
    metavar="LIST",
    help="From unisono, unisono-torch, gloo, nccl, mpi; the first is the one that others are "
    "compared with.  [default: unisono,gloo; on GPUs nccl, too]",
)
@click.option(
    "--algo", metavar="LIST", help="unisono by these algorithms: direct,ring,binomial, ..."
)
@click.option(
    "--device",
    type=click.Choice(DEVICES),
    default="cpu",
    show_default=True,
    help="Where the tensors lie. Ranks share the GPUs that there are; nccl, which wants one for "
    "each, takes part where there are enough.",
)
@click.option("--dtype", default="float32", show_default=True, metavar="NAME")
@click.option("--op", default="sum", show_default=True, metavar="NAME", help="The reduction.")
@click.option("--root", type=click.IntRange(min=0), help="[default: each rank in turn]")
@click.option(
    "--place",
    type=click.Choice(["natural", "in", "out", "both"]),
    default="natural",
    show_default=True,
    help="In place, out of place, or what torch's own form of the call does.",
)
@click.option(
    "--over",
    type=click.Choice(["max", "mean", "min"]),
    default="max",
    show_default=True,
    help="Which of the ranks' times counts.",
)
@click.option(
    "--budget",
    "budget_s",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Time for one row, all backends together.  [default: up to 2]",
)
@click.option(
    "--mpi-spins", is_flag=True, help="Let MPI spin where it waits: faster on a quiet machine."
)
@click.option("--no-floor", is_flag=True, help="Do not measure the local floor.")
@click.option("--fresh", is_flag=True, help="Neither use nor keep models of earlier runs.")
@click.option(
    "--compare-untuned",
    "untuned",
    is_flag=True,
    help="unisono without the table of `unisono tune` as well: where do they differ?",
)
@click.option("--json", "json_path", type=click.Path(path_type=Path), metavar="FILE")
@click.option("--csv", "csv_path", type=click.Path(path_type=Path), metavar="FILE")
@click.option("--plot", "plot_path", type=click.Path(path_type=Path), metavar="FILE.png")
@click.option("--html", "html_path", type=click.Path(path_type=Path), metavar="FILE")
def measure(
    collectives: tuple[str, ...],
    ranks: int | None,
    sizes: str | None,
    factor: int,
    backends: str | None,
    algo: str | None,
    device: str,
    dtype: str,
    op: str,
    root: int | None,
    place: str,
    over: str,
    budget_s: float | None,
    mpi_spins: bool,
    no_floor: bool,
    fresh: bool,
    untuned: bool,
    json_path: Path | None,
    csv_path: Path | None,
    plot_path: Path | None,
    html_path: Path | None,
) -> None:
    """Measure COLLECTIVES on every backend asked for, by turns in the same processes.

    COLLECTIVES are all_reduce, all_gather, reduce_scatter, broadcast, reduce, gather, scatter,
    all_to_all, barrier, ping_pong and stream (messages), all_reduce_async (begun and awaited),
    gradients (a list of tensors); or all.

    Each row shows the median time, nccl-tests' algbw and busbw, how many elements of the result
    were wrong, what a model expected that was fitted to other sizes, and a verdict. The model is
    of the same run; for one or two sizes, of an earlier one. The exit code is 1 if any result was
    wrong. docs/bench.md says how to read it all.

    Under torchrun, `unisono run` or mpirun their ranks are used, and rank 0 prints.
    """
    from rich.console import Console

    from unisono.bench import meeting, start, tuned
    from unisono.bench.request import Request
    from unisono.bench.show import Show
    from unisono.bench.text import summary

    try:
        launched = meeting.launched_rank()
        settings = Request(
            collectives=collectives,
            sizes=sizes,
            ranks=ranks,
            backends=backends,
            algo=algo,
            device=device,
            dtype=dtype,
            op=op,
            root=root,
            place=place,
            over=over,
            budget_s=budget_s,
            mpi_spins=mpi_spins,
            floor=not no_floor,
            fresh=fresh,
            untuned=untuned,
            factor=factor,
        ).settings(None if launched is None else launched.size)
    except (UnisonoError, ValueError) as error:
        raise Misuse(str(error)) from error
    is_first = launched is None or launched.rank == 0
    outputs = _outputs(json_path, csv_path, plot_path, html_path) if is_first else []
    console = Console(quiet=not is_first)
    show = Show(console)
    interrupted = False
    failure: UnisonoError | None = None
    with show:
        try:
            start.run(settings, show.handle_event, show.print_line)
        except KeyboardInterrupt:
            interrupted = True
        except UnisonoError as error:
            failure = error
    if not is_first:
        raise SystemExit(130 if interrupted else 1 if failure is not None else 0)
    if show.run is not None:
        show.run.machine["command"] = click.get_current_context().meta[_COMMAND]
        for line in [*summary(show.run), *tuned.lines(show.run)]:
            console.print(line, markup=False, highlight=False)
        if show.run.rows:
            _save(outputs, show.run)
    if failure is not None:
        raise click.ClickException(str(failure))
    if interrupted:
        raise SystemExit(130)
    if show.run is not None and show.run.wrong:
        raise SystemExit(1)
    if show.run is None or not show.run.rows:
        raise click.ClickException("nothing was measured")


@bench.command(name="compare")
@click.argument("old", type=click.Path(path_type=Path))
@click.argument("new", type=click.Path(path_type=Path))
@click.option(
    "--threshold",
    default=10.0,
    show_default=True,
    metavar="PERCENT",
    type=click.FloatRange(min=0),
    help="Smaller changes are left out.",
)
@click.option(
    "--html", "html_path", type=click.Path(path_type=Path), metavar="FILE", help="NEW as a page."
)
def compare_command(old: Path, new: Path, threshold: float, html_path: Path | None) -> None:
    """Compare two files of `unisono bench --json`: OLD before a change, NEW after it.

    A row is slower (or faster) if its median moved by more than the threshold and the middle
    halves of the two runs' samples do not overlap; other differences are noise. The exit code is
    1 if anything became slower or wrong.
    """
    from unisono.bench import html
    from unisono.bench.compare import compare, lines
    from unisono.bench.results import read

    try:
        before, after = read(old), read(new)
        comparison = compare(before, after, threshold / 100)
    except UnisonoError as error:
        raise Misuse(str(error)) from error
    if not comparison.changes:
        raise Misuse(f"{old} and {new} have no row in common")
    if html_path is not None:
        check_writable(html_path)
    for line in lines(comparison):
        click.echo(line)
    if html_path is not None:
        _save([(html_path, lambda run, path: path.write_text(html.page(run, before)))], after)
    raise SystemExit(1 if comparison.is_regression else 0)


# -- what becomes of it ------------------------------------------------------------------------


def _outputs(
    json_path: Path | None, csv_path: Path | None, plot_path: Path | None, html_path: Path | None
) -> list[tuple[Path, Callable[[Any, Path], object]]]:
    """Where to write what, each file tried before anything is measured."""
    from unisono.bench import html, plot, results, table

    if plot_path is not None:
        if plot_path.suffix not in plot.SUFFIXES:
            raise Misuse(f"--plot {plot_path}: a name that ends in {', '.join(plot.SUFFIXES)}")
        try:
            plot.check_available()
        except UnisonoError as error:
            raise Misuse(str(error)) from error
    wanted: list[tuple[Path | None, Callable[[Any, Path], object]]] = [
        (json_path, lambda run, path: path.write_text(results.to_json(run))),
        (csv_path, lambda run, path: path.write_text(table.to_csv(run))),
        (plot_path, plot.save),
        (html_path, lambda run, path: path.write_text(html.page(run))),
    ]
    found = [(path, save) for path, save in wanted if path is not None]
    for path, _ in found:
        check_writable(path)
    return found


def _save(outputs: Sequence[tuple[Path, Callable[[Any, Path], object]]], run: Any) -> None:
    for path, save in outputs:
        try:
            save(run, path)
        except (OSError, UnisonoError) as error:
            click.echo(f"{path} was not written: {error}", err=True)
        else:
            click.echo(f"wrote {path}")
