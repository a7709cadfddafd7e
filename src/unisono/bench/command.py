"""`unisono bench`: arguments, checked before anything runs, and output."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from unisono.bench import settings
from unisono.errors import Misuse, UnisonoError
from unisono.launcher.command import check_writable
from unisono.output_files import write_text

if TYPE_CHECKING:
    from unisono.bench.results import Run

EXAMPLES = """\b
  unisono bench                               the main collectives, against gloo
  unisono bench all_reduce -n 2 --sizes 8:256M --backends unisono,gloo
  unisono bench all_reduce --sizes 400000000  100 million float32 elements
  unisono bench all_reduce --dtype bfloat16 --op max --budget 5
  unisono bench --device cuda                 CUDA tensors, also of ranks that share a GPU
  unisono bench --json run.json --plot run.png --html run.html
  unisono bench compare old.json run.json     exit code 1 if anything became slower
  torchrun --nproc-per-node 8 -m unisono bench all_reduce --backends nccl,gloo
  mpirun -n 2 python -m unisono bench all_reduce --backends unisono,mpi
"""


class _Bench(click.Command):
    """`bench compare` compares; everything else measures."""

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **more: Any,
    ) -> click.Context:
        if args[:1] == ["compare"]:
            return compare.make_context(f"{info_name} compare", args[1:], parent, **more)
        more["obj"] = shlex.join(["unisono", "bench", *args])
        return super().make_context(info_name, args, parent, **more)


@click.command(cls=_Bench, epilog=f"Examples:\n\n{EXAMPLES}")
@click.argument("collectives", nargs=-1)
@click.option("-n", "--ranks", type=click.IntRange(min=1), help="[default: the cores, at least 2]")
@click.option(
    "--sizes",
    metavar="LIST",
    help=f"Bytes: 8,1K,64M or a range 8:256M, by powers of {settings.SWEEP_FACTOR}.  [default: "
    f"{settings.DEFAULT_SIZES}; with COLLECTIVES {settings.DEFAULT_SWEEP}]",
)
@click.option(
    "--backends",
    metavar="LIST",
    help="From unisono, unisono-torch, gloo, nccl, mpi; the others are compared with the first.  "
    "[default: unisono,gloo; on GPUs nccl, too]",
)
@click.option(
    "--algo", metavar="LIST", help="unisono by these algorithms: direct,ring,binomial, ..."
)
@click.option(
    "--device",
    type=click.Choice(settings.DEVICES),
    default="cpu",
    show_default=True,
    help="Where the tensors are. Ranks share the available GPUs; nccl, which needs one per rank, "
    "takes part if there are enough.",
)
@click.option("--dtype", default="float32", show_default=True, metavar="NAME")
@click.option("--op", default="sum", show_default=True, metavar="NAME", help="The reduction.")
@click.option("--root", type=click.IntRange(min=0), help="[default: each rank in turn]")
@click.option(
    "--budget",
    "budget_s",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Time for one row, all backends together.  [default: up to 2]",
)
@click.option("--no-floor", is_flag=True, help="Do not measure the local floor.")
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), metavar="FILE", help="Write the rows."
)
@click.option(
    "--plot", "plot_path", type=click.Path(path_type=Path), metavar="FILE.png", help="Draw a chart."
)
@click.option(
    "--html", "html_path", type=click.Path(path_type=Path), metavar="FILE", help="Write a page."
)
def bench(
    collectives: tuple[str, ...],
    no_floor: bool,
    json_path: Path | None,
    plot_path: Path | None,
    html_path: Path | None,
    **asked: Any,
) -> None:
    """Measure collectives on any backend, and compare them with a model.

    COLLECTIVES are all_reduce, all_gather, reduce_scatter, broadcast, reduce, gather, scatter,
    all_to_all, barrier, ping_pong and stream (messages), all_reduce_async (begun and awaited),
    gradients (a list of tensors); or all. Backends take turns in the same processes.

    Each row shows the median time, nccl-tests' algbw and busbw, how many elements of the result
    were wrong, what a model fitted to other sizes of the same run expected, and a verdict. The exit
    code is 1 if any result was wrong, or a file could not be written. docs/bench.md explains how to
    read it.

    Under torchrun, `unisono run` or mpirun it uses their ranks, and rank 0 prints.
    """
    from rich.console import Console

    from unisono.bench import session
    from unisono.bench.show import Show
    from unisono.bench.text import summary

    try:
        here = session.find_ranks()
        there = None if here is None else here.size
        checked = settings.check_settings(collectives, there=there, floor=not no_floor, **asked)
    except (UnisonoError, ValueError) as error:
        raise Misuse(str(error)) from error
    is_first = here is None or here.rank == 0
    if is_first:  # before anything is measured
        _check_plot(plot_path)
        for path in (json_path, plot_path, html_path):
            if path is not None:
                check_writable(path)
    console = Console(quiet=not is_first)
    show = Show(console)
    interrupted = unwritten = False
    failure: UnisonoError | None = None
    with show, nullcontext() if here is None else _ended_by_signals():
        try:
            session.run(checked, show.handle_event, show.print_line)
        except KeyboardInterrupt:
            interrupted = True
        except UnisonoError as error:
            failure = error
    if not is_first:
        raise SystemExit(130 if interrupted else 1 if failure is not None else 0)
    if show.run is not None:
        show.run.machine["command"] = click.get_current_context().obj
        for line in summary(show.run):
            console.print(line, markup=False, highlight=False)
        if show.run.rows:
            unwritten = _save(show.run, json_path, plot_path, html_path)
    if failure is not None:
        raise click.ClickException(str(failure))
    if interrupted:
        raise SystemExit(130)
    if unwritten or (show.run is not None and show.run.wrong):
        raise SystemExit(1)
    if show.run is None or not show.run.rows:
        raise click.ClickException("nothing was measured")


@click.command()
@click.argument("old", type=click.Path(path_type=Path))
@click.argument("new", type=click.Path(path_type=Path))
@click.option(
    "--threshold",
    default=10.0,
    show_default=True,
    metavar="PERCENT",
    type=click.FloatRange(min=0),
    help="Smaller changes are ignored.",
)
def compare(old: Path, new: Path, threshold: float) -> None:
    """Compare two files of `unisono bench --json`: OLD before a change, NEW after it.

    A row is slower (or faster) if its median moved by more than the threshold and the middle
    halves of the two runs' samples do not overlap; other differences are noise. The exit code is
    1 if anything became slower or wrong.
    """
    from unisono.bench.compare import compare_runs, lines
    from unisono.bench.results import read

    try:
        comparison = compare_runs(read(old), read(new), threshold / 100)
    except UnisonoError as error:
        raise Misuse(str(error)) from error
    if not comparison.changes:
        raise Misuse(f"{old} and {new} have no row in common")
    for line in lines(comparison):
        click.echo(line)
    raise SystemExit(1 if comparison.is_regression else 0)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """A launcher ends this rank by SIGTERM: treat it like Ctrl-C."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _check_plot(path: Path | None) -> None:
    from unisono.bench import plot
    from unisono.show import charts

    if path is None:
        return
    if path.suffix not in plot.SUFFIXES:
        raise Misuse(f"--plot {path}: the name must end in {', '.join(plot.SUFFIXES)}")
    if not charts.is_available():
        raise Misuse(f"plots need matplotlib: {charts.INSTALL}")


def _save(run: Run, json_path: Path | None, plot_path: Path | None, html_path: Path | None) -> bool:
    """Write the requested files; if one fails, the others are still written. Returns whether one
    failed."""
    from unisono.bench import html, plot, results

    writers: list[tuple[Path | None, Callable[[Path], Any]]] = [
        (json_path, lambda path: write_text(path, results.to_json(run))),
        (plot_path, lambda path: plot.save(run, path)),
        (html_path, lambda path: write_text(path, html.page(run))),
    ]
    failed = False
    for path, write in writers:
        if path is None:
            continue
        try:
            write(path)
        except (OSError, UnisonoError) as error:
            failed = True
            click.echo(f"{path} was not written: {error}", err=True)
        else:
            click.echo(f"wrote {path}")
    return failed
