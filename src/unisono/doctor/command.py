"""`unisono doctor`: this machine and every primitive on it, or saved reports."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from unisono.errors import Misuse
from unisono.launcher.command import check_writable
from unisono.output_files import write_text
from unisono.torch_support import require_torch


@click.command()
@click.option("-n", "--ranks", default=2, show_default=True, type=click.IntRange(1, 64))
@click.option(
    "--backends",
    default="unisono,gloo",
    show_default=True,
    metavar="NAMES",
    help="The backends of the self-test; with an empty list it is skipped.",
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON, for programs.")
@click.option("--variables", is_flag=True, help="Show every known environment variable; no test.")
@click.option(
    "--topology",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Measure this machine and write it as a topology for `unisono plan` and `layout`.",
)
@click.option("--stacks", is_flag=True, help="With REPORTS: the stack of every rank.")
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="With REPORTS: write a page that explains them, for a browser.",
)
@click.argument("reports", nargs=-1, type=click.Path(path_type=Path))
@click.pass_context
def doctor(
    context: click.Context,
    ranks: int,
    backends: str,
    as_json: bool,
    variables: bool,
    topology: Path | None,
    stacks: bool,
    html: Path | None,
    reports: tuple[Path, ...],
) -> None:
    """Check this machine and every primitive on it, or show saved REPORTS.

    Checks versions, kernel, memory, limits, cores, network, GPUs and environment variables, and
    says in one sentence how to fix each problem. Then starts RANKS processes that run every
    collective and message on each backend and check the results. The exit code is 1 if anything is
    red. In your own program the same test is unisono.self_test().

    REPORTS are files that ranks saved when something went wrong (error.report.save): it shows the
    verdict, where every rank was, and the stacks of the ranks to blame. Several ranks' reports of
    one incident are shown once. The exit code is 1 if a file cannot be read.
    """
    if reports:
        _check_options(context, "saved reports", "as_json", "stacks", "html")
        well = _show_reports(reports, stacks, as_json, html)
    elif topology is not None:
        _check_options(context, "--topology", "topology")
        require_torch("unisono doctor --topology")
        from unisono.doctor.topology import write_topology

        check_writable(topology)
        click.echo(write_topology(topology))
        well = True
    elif variables:
        _check_options(context, "--variables", "variables")
        from unisono.doctor.diagnosis import print_variables

        print_variables(Console(), every=True)
        well = True
    else:
        _check_options(context, "a check of this machine", "as_json", "ranks", "backends")
        from unisono.doctor.diagnosis import print_json, run_doctor

        names = [name.strip().lower() for name in backends.split(",") if name.strip()]
        well = print_json(ranks, names) if as_json else run_doctor(ranks, names, Console())
    raise SystemExit(0 if well else 1)


def _check_options(context: click.Context, what: str, *fitting: str) -> None:
    for name in context.params:
        given = context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if given and name not in ("reports", *fitting):
            raise Misuse(f"--{name.removeprefix('as_')} cannot be used with {what}")


def _show_reports(files: tuple[Path, ...], stacks: bool, as_json: bool, html: Path | None) -> bool:
    from unisono.doctor.saved_reports import incident_page, print_json, print_reports, read

    reading = read(files)
    if html is not None and reading.incidents:
        check_writable(html)
        write_text(html, incident_page(reading))
        click.echo(f"wrote {html}", err=True)
    if as_json:
        print_json(reading)
    else:
        print_reports(reading, stacks, Console())
    for problem in reading.problems:
        click.echo(f"Error: {problem}", err=True)
    return not reading.problems
