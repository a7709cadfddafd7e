"""The command `unisono`: a table of commands, each imported on first use."""

from __future__ import annotations

import errno
import importlib
import signal
from typing import Any

import click

from unisono.errors import Misuse, UnisonoError, name_closest

COMMANDS = {
    "bench": (
        "unisono.bench.command",
        "Measure collectives on any backend, and compare them with a model.",
    ),
    "demo": ("unisono.demo.command", "Show what every primitive does, then race gloo."),
    "doctor": (
        "unisono.doctor.command",
        "Check this machine and every primitive on it, or show saved REPORTS.",
    ),
    "layout": (
        "unisono.plan.layouts.command",
        "Rank the layouts of a model on a cluster: tp x cp x pp x dp x ep, memory and time.",
    ),
    "learn": (
        "unisono.learn.command",
        'The course "Collectives from zero": read, solve, check, go on.',
    ),
    "plan": ("unisono.plan.command", "Compare the algorithms of a collective, or show one."),
    "run": ("unisono.launcher.command", "Start PROGRAM on several ranks of this machine."),
    "secret": ("unisono.launcher.secret", "Write a new secret for the ranks of your jobs to FILE."),
    "top": (
        "unisono.watch.command",
        "Show the running jobs of this user on this machine, rank by rank.",
    ),
}
"""Each command: the module that defines it, and its line in the help."""


class _LazyGroup(click.Group):
    """The commands of COMMANDS, each imported only when it runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(COMMANDS[cmd_name][0]), cmd_name)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args[0] not in COMMANDS and (likely := name_closest(args[0], COMMANDS)):
            ctx.fail(f"No such command {args[0]!r}. Did you mean {likely!r}?")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # click would exit with 1, which doctor uses for a failed check
            click.echo("\nAborted!", err=True)
            raise SystemExit(128 + signal.SIGINT) from None
        except UnisonoError as error:
            click.echo(f"Error: {error}", err=True)
            raise SystemExit(2 if isinstance(error, Misuse) else 1) from None
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise click.ClickException(f"{error.strerror}: {error.filename or 'output'}") from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.list_commands(ctx)])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="unisono")
def main() -> None:
    """Collective communication for PyTorch."""


if __name__ == "__main__":
    main()
