"""The command line, from its own help."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from unisono.cli import main

_WIDTH = 96


def write_page(source: Path) -> str:
    """Write the page below `source`; returns its name."""
    text = "# The command line\n\nWhat every command says of itself by `--help`.\n\n"
    for path, command in commands(("unisono",), main):
        text += f"## {' '.join(path)}\n\n```text\n{help_of(path, command)}\n```\n\n"
    (source / "reference").mkdir(parents=True, exist_ok=True)
    (source / "reference/command_line.md").write_text(text)
    return "reference/command_line"


def commands(
    path: tuple[str, ...], command: click.Command
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """A command and those below it, each with the words by which it is called."""
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below is not None and not below.hidden:
                yield from commands((*path, name), below)


def help_of(path: tuple[str, ...], command: click.Command) -> str:
    """What `--help` prints."""
    context = click.Context(command, info_name=" ".join(path), max_content_width=_WIDTH)
    context.terminal_width = _WIDTH
    return command.get_help(context)
