"""`unisono bench`: what was asked for, checked before anything runs, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from unisono.environment import RankInfo
from unisono.errors import UnisonoError
from unisono.misuse import Misuse

EXAMPLES = """\b
  unisono bench                               the main collectives, against gloo
  unisono bench all_reduce -n 2 --sizes 8:256M --backends unisono,gloo,mpi
  unisono bench all_reduce --sizes 400000000  100 million float32 elements
  unisono bench all_gather broadcast --sizes 1K,1M --place both
  unisono bench all_reduce --dtype bfloat16 --op max --budget 5
  unisono bench --json run.json --csv run.csv --plot run.png --html run.html
  unisono bench compare old.json run.json     exit code 1 if anything became slower
  torchrun --nproc-per-node 8 -m unisono bench all_reduce --backends nccl,gloo
"""
DEFAULT_SIZES = "8,256,4K,16K,64K,256K,1M,4M,16M,64M"
DEFAULT_SWEEP = "8:256M"
SWEEP_FACTOR = 4
MEMORY_SHARE = 0.9
"""The share of the free memory that a run may use."""


class _Bench(click.Group):
    """`bench compare` compares; everything else measures."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
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


@bench.command(epilog=f"Examples:\n\n{EXAMPLES}")
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
    "compared with.  [default: unisono,gloo]",
)
@click.option(
    "--algo", metavar="LIST", help="unisono by these algorithms: direct,ring,binomial, ..."
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
    dtype: str,
    op: str,
    root: int | None,
    place: str,
    over: str,
    budget_s: float | None,
    mpi_spins: bool,
    no_floor: bool,
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
    were wrong, what a model fitted to other sizes of the same run expected, and a verdict. The
    exit code is 1 if any result was wrong. docs/bench.md says how to read it all.

    Under torchrun, `unisono run` or mpirun their ranks are used, and rank 0 prints.
    """
    from dataclasses import replace

    from rich.console import Console

    from unisono.bench import start
    from unisono.bench.collectives import DTYPES, MAIN
    from unisono.bench.settings import BenchSettings
    from unisono.bench.settings import budget_s as usual_budget_s
    from unisono.bench.show import Show
    from unisono.bench.text import summary

    launched = _launched_rank()
    ranks = _ranks(ranks, launched)
    settings = BenchSettings(
        ranks=ranks,
        collectives=_known_collectives(collectives or MAIN),
        sizes_bytes=_sizes(sizes or (DEFAULT_SWEEP if collectives else DEFAULT_SIZES), factor),
        backends=_known_backends(backends),
        algorithms=_known_algorithms(algo),
        dtype=_one_of("dtype", dtype, DTYPES),
        op=_meaningful_op(op, dtype),
        root=_checked_root(root, ranks),
        placement=place,
        over=over,
        floor=not no_floor,
        mpi_spins=mpi_spins,
    )
    cases = settings.cases()
    if not cases:
        where = "in place" if place == "in" else "out of place"
        raise Misuse(f"no collective that was asked for works {where}")
    seconds = budget_s if budget_s is not None else usual_budget_s(len(cases))
    settings = replace(settings, budget_s=seconds)
    is_first = launched is None or launched.rank == 0
    outputs = _outputs(json_path, csv_path, plot_path, html_path) if is_first else []
    _check_memory(settings)
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
        for line in summary(show.run):
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
def compare_command(old: Path, new: Path, threshold: float) -> None:
    """Compare two files of `unisono bench --json`: OLD before a change, NEW after it.

    A row is slower (or faster) if its median moved by more than the threshold and the middle
    halves of the two runs' samples do not overlap; other differences are noise. The exit code is
    1 if anything became slower or wrong.
    """
    from unisono.bench.compare import compare, lines
    from unisono.bench.results import read

    try:
        comparison = compare(read(old), read(new), threshold / 100)
    except UnisonoError as error:
        raise Misuse(str(error)) from error
    if not comparison.changes:
        raise Misuse(f"{old} and {new} have no row in common")
    for line in lines(comparison):
        click.echo(line)
    raise SystemExit(1 if comparison.is_regression else 0)


# -- what was asked for ------------------------------------------------------------------------


def _one_of(what: str, name: str, known: Sequence[str]) -> str:
    if name not in known:
        raise Misuse(f"there is no {what} {name}: choose from {', '.join(known)}")
    return name


def _names(what: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    return tuple(dict.fromkeys(_one_of(what, name, known) for name in names))


def _known_collectives(names: Sequence[str]) -> tuple[str, ...]:
    from unisono.bench.collectives import COLLECTIVES

    joined = ",".join(names)
    return tuple(COLLECTIVES) if joined == "all" else _names("collective", joined, [*COLLECTIVES])


def _known_backends(text: str | None) -> tuple[str, ...]:
    from unisono.bench.backends.base import BACKENDS

    names = _names("backend", text or "unisono,gloo", BACKENDS)
    if not names:
        raise Misuse(f"--backends names none: choose from {', '.join(BACKENDS)}")
    return names


def _known_algorithms(text: str | None) -> tuple[str, ...]:
    if text is None:
        return ()
    from unisono.bench.backends.ours import ENGINES_OWN
    from unisono.plan.catalog import RENAMED, catalog

    known = sorted({algorithm.name for algorithm in catalog()} - {ENGINES_OWN})
    if old := {name for _, name in RENAMED} & {*text.split(",")}:
        known += sorted(old)
    return _names("algorithm", text, [ENGINES_OWN, *known])


def _meaningful_op(op: str, dtype: str) -> str:
    from unisono.comm.base import has_meaning
    from unisono.plan.expectations import REDUCTIONS

    _one_of("reduction", op, [*REDUCTIONS])
    if not has_meaning(op, dtype):
        raise Misuse(f"{op} has no meaning for {dtype}")
    return op


def _sizes(text: str, factor: int) -> tuple[int, ...]:
    from unisono.plan.sizes import parse_sizes

    try:
        sizes = parse_sizes(text, factor)
    except ValueError as error:
        raise Misuse(f"--sizes: {error}") from error
    if min(sizes) < 1:
        raise Misuse("--sizes: the smallest size is 1 byte")
    return tuple(sorted(set(sizes)))


def _launched_rank() -> RankInfo | None:
    from unisono.bench import meeting

    try:
        return meeting.launched_rank()
    except (UnisonoError, ValueError) as error:
        raise Misuse(str(error)) from error


def _ranks(asked: int | None, launched: RankInfo | None) -> int:
    """As many as there are already, or were asked for, or cores."""
    from unisono.launcher.share import core_count

    if launched is None:
        return asked or max(2, core_count())
    if asked is not None and asked != launched.size:
        raise Misuse(f"this process is one of {launched.size} ranks already: leave -n {asked} out")
    return launched.size


def _checked_root(root: int | None, ranks: int) -> int | None:
    if root is not None and root >= ranks:
        raise Misuse(f"--root {root} is not a rank: there are {ranks}")
    return root


def _check_memory(settings: Any) -> None:
    """Say before anything runs that the largest row does not fit."""
    from unisono.bench.machine import free_bytes
    from unisono.plan.sizes import format_size

    room = free_bytes()
    need, what = settings.memory_bytes()
    if room is not None and need > MEMORY_SHARE * room:
        raise Misuse(
            f"{what} on {settings.ranks} ranks needs about {format_size(need)}B of memory, and "
            f"{format_size(MEMORY_SHARE * room)}B may be used: choose smaller sizes"
        )


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
        _check_writable(path)
    return found


def _check_writable(path: Path) -> None:
    folder = path.resolve().parent
    if path.is_dir():
        raise Misuse(f"{path} is a folder, and a file was to be written there")
    if not folder.is_dir():
        raise Misuse(f"the folder of {path} does not exist")
    existed = path.exists()
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        raise Misuse(f"{path} cannot be written: {error.strerror}") from error
    if not existed:
        path.unlink()


def _save(outputs: Sequence[tuple[Path, Callable[[Any, Path], object]]], run: Any) -> None:
    for path, save in outputs:
        try:
            save(run, path)
        except (OSError, UnisonoError) as error:
            click.echo(f"{path} was not written: {error}", err=True)
        else:
            click.echo(f"wrote {path}")
