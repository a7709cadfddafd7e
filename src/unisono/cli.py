"""The command `unisono`."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from unisono.bench.command import bench
from unisono.errors import TorchMissing, UnisonoError
from unisono.plan.command import plan


class _Misuse(click.ClickException):
    """A request that cannot be met, in one sentence."""

    exit_code = 2


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="unisono")
def main() -> None:
    """Collective communication for PyTorch on one machine."""


main.add_command(bench)
main.add_command(plan)


@main.command()
@click.option("-n", "--ranks", default=4, show_default=True, type=click.IntRange(2, 8))
@click.option(
    "--only",
    type=click.Choice(["pictures", "race"]),
    help="One half of it: the primitives as pictures, or the race with gloo.",
)
@click.option(
    "--report",
    default="demo-report.md",
    show_default=True,
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Where to write what was shown.",
)
def demo(ranks: int, only: str | None, report: Path) -> None:
    """Show what every primitive does, then race gloo.

    Starts RANKS processes on this machine, runs the primitives on small numbers and draws what
    each rank had, what moved and what each rank has, a deadlock and a mismatch included; then
    measures all_reduce on two ranks, in turns with gloo.
    """
    from unisono.demo.tour import run_demo

    if not report.resolve().parent.is_dir():
        raise click.BadParameter(f"the folder of {report} does not exist", param_hint="--report")
    try:
        run_demo(ranks, report, Console(), pictures=only != "race", racing=only != "pictures")
    except UnisonoError as error:
        raise click.ClickException(str(error)) from error


@main.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "-n", "--ranks", required=True, type=click.IntRange(min=1), help="How many processes to start."
)
@click.option("-m", "--module", is_flag=True, help="PROGRAM is a module, as for python -m.")
@click.option(
    "--backend", metavar="NAME", help="The default for init_process_group() without a backend."
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    help="Threads a rank (OMP_NUM_THREADS).  [default: as many as fit the cores]",
)
@click.option("--pin", is_flag=True, help="Bind each rank to its share of the cores.")
@click.option(
    "--timeout",
    "timeout_s",
    metavar="SECONDS",
    type=click.FloatRange(min=0, min_open=True),
    help="End everything after so long, and show where each rank was.",
)
@click.option("--no-prefix", is_flag=True, help="Leave out [rank 0] before each line.")
@click.option(
    "--capture", is_flag=True, help="Show what ranks write only if they fail: the last of it."
)
@click.option("--watch", is_flag=True, help="Report hangs and more (UNISONO_WATCH=1).")
@click.option(
    "--watch-grace",
    "watch_grace_s",
    metavar="SECONDS",
    type=click.FloatRange(min=0),
    default=10.0,
    show_default=True,
    help="With --watch: end everything so long after a report of a mismatch; inf: never.",
)
@click.option(
    "--trace",
    metavar="FILE",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write a trace of all calls, for chrome://tracing and ui.perfetto.dev. Implies --watch.",
)
@click.argument("program")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(
    ranks: int,
    module: bool,
    backend: str | None,
    threads: int | None,
    pin: bool,
    timeout_s: float | None,
    no_prefix: bool,
    capture: bool,
    watch: bool,
    watch_grace_s: float,
    trace: Path | None,
    program: str,
    args: tuple[str, ...],
) -> None:
    """Start PROGRAM on several ranks of this machine.

    \b
      unisono run -n 4 train.py --lr 0.1       four ranks of train.py
      unisono run -n 2 -m package.train        a module
      unisono run -n 4 --backend gloo train.py

    In the program, unisono.init() joins the ranks, and so does torch.distributed's
    init_process_group(): RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and the other
    variables are set as torchrun sets them. No port needs to be chosen, and any number of runs may
    go on at once.

    Every line that a rank writes comes with the rank's name. If ranks fail, the others are ended
    and each traceback is shown once. The exit code is that of the first rank to fail (128 + N for
    signal N), 124 after a timeout.

    For several machines use torchrun; unisono works in the programs that it starts, too.
    """
    from unisono.launcher.protocol import Script
    from unisono.launcher.script import RunSettings, run_script

    if not module and not Path(program).is_file():
        there = "is no file" if Path(program).exists() else "does not exist"
        raise _Misuse(f"{program} {there}")
    settings = RunSettings(
        ranks=ranks,
        backend=None if backend is None else _known_backend(backend),
        threads=threads,
        pin=pin,
        timeout_s=timeout_s,
        prefix=not no_prefix,
        capture=capture,
        watch=watch,
        watch_grace_s=watch_grace_s,
        trace=None if trace is None else trace.absolute(),
    )
    try:
        outcome = run_script(Script(program, module, args), settings)
    except UnisonoError as error:
        raise click.ClickException(str(error)) from error
    if outcome.report is not None:
        click.echo(f"\nunisono.watch: {outcome.report}", err=True)
    if outcome.error is not None:
        click.echo(f"\nunisono run: {outcome.error}", err=True)
    raise SystemExit(outcome.exit_code)


@main.command()
@click.option("-n", "--ranks", default=2, show_default=True, type=click.IntRange(1, 64))
@click.option(
    "--backends",
    default="unisono,gloo",
    show_default=True,
    metavar="NAMES",
    help="What the self-test runs on; an empty list leaves it out.",
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON, for programs.")
@click.option("--variables", is_flag=True, help="Show every known environment variable; no test.")
@click.option("--markdown", is_flag=True, help="With --variables: the table for a document.")
@click.option("--stacks", is_flag=True, help="With REPORTS: the stack of every rank.")
@click.argument("reports", nargs=-1, type=click.Path(path_type=Path))
@click.pass_context
def doctor(
    context: click.Context,
    ranks: int,
    backends: str,
    as_json: bool,
    variables: bool,
    markdown: bool,
    stacks: bool,
    reports: tuple[Path, ...],
) -> None:
    """Check this machine and every primitive on it, or show saved REPORTS.

    Looks at versions, kernel, memory, limits, cores, network, GPUs and environment variables, and
    says in one sentence what to do about each that is not well. Then starts RANKS processes that
    run every collective and message on each backend and compare the results with what they must
    be. The exit code is 1 if anything is red. In a program of your own the same test is
    unisono.debug_communication().

    REPORTS are files that ranks have saved when something went wrong (error.report.save): shown
    are the verdict, where every rank was, and the stacks of those to blame. What several ranks
    have saved of one incident is shown once. The exit code is 1 if a file cannot be read.
    """
    if reports:
        _show_reports(reports, stacks, as_json, context)
        return
    if stacks:
        raise _Misuse("--stacks goes with saved reports")
    if markdown and not variables:
        raise _Misuse("--markdown goes with --variables")
    if variables:
        _show_variables(markdown)
        return
    from unisono.doctor.command import print_json, run_doctor

    names = [name.strip().lower() for name in backends.split(",") if name.strip()]
    try:
        well = print_json(ranks, names) if as_json else run_doctor(ranks, names, Console())
    except UnisonoError as error:
        raise click.ClickException(str(error)) from error
    raise SystemExit(0 if well else 1)


def _show_reports(
    files: tuple[Path, ...], stacks: bool, as_json: bool, context: click.Context
) -> None:
    for name in ("ranks", "backends", "variables", "markdown"):
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise _Misuse(f"--{name} does not go with saved reports")
    from unisono.doctor.saved_reports import run

    problems = run(files, stacks, as_json, Console()).problems
    for problem in problems:
        click.echo(f"Error: {problem}", err=True)
    raise SystemExit(1 if problems else 0)


def _show_variables(markdown: bool) -> None:
    from unisono.doctor import variables
    from unisono.doctor.command import print_variables

    if markdown:
        click.echo(variables.markdown(), nl=False)
    else:
        print_variables(Console(), every=True)


@main.command()
@click.option("--once", is_flag=True, help="Show the jobs once and end.")
@click.option("--json", "wants_json", is_flag=True, help="The same as JSON, for scripts.")
@click.argument("pid", type=int, required=False)
def top(once: bool, wants_json: bool, pid: int | None) -> None:
    """Show the running jobs of this user on this machine, rank by rank.

    Finds every process that is in a group of unisono, or in one of another backend that is
    watched (unisono.watch); the jobs need not be prepared, and do not notice. A rank that is stuck
    is red. `s` shows stacks (of jobs that are watched), `q` quits. With PID, only the job of which
    that process is a rank or the launcher.
    """
    from unisono.watch.top import run

    run(once, wants_json, pid, Console())


def _known_backend(name: str) -> str:
    from unisono.torch_backend.autoload import backend_problem

    try:
        problem = backend_problem(name.lower())
    except TorchMissing as error:
        raise _Misuse(str(error)) from error
    if problem:
        raise _Misuse(problem)
    return name.lower()


if __name__ == "__main__":
    main()
