"""The command line, from its own help."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from unisono.cli import main

_WIDTH = 78


def write_pages(source: Path) -> str:
    """Write a page that lists the commands, and one for each of them, with the commands below it;
    returns the name of the first."""
    folder = source / "reference"
    folder.mkdir(parents=True, exist_ok=True)
    (_, whole), *below = commands(("unisono",), main)
    pages: dict[str, str] = {}
    for path, command in below:
        heading = "#" * (len(path) - 1)
        told = f"{heading} {' '.join(path)}\n\n```text\n{help_of(path, command)}\n```\n\n"
        pages[path[1]] = pages.get(path[1], "") + told
    for name, text in pages.items():
        (folder / f"command_line.{name}.md").write_text(text)
    links = ", ".join(f"[{name}](command_line.{name}.md)" for name in pages)
    listed = "".join(f"unisono {name} <command_line.{name}>\n" for name in pages)
    (folder / "command_line.md").write_text(
        "# The command line\n\nWhat every command says of itself by `--help`: "
        f"{links}.\n\n```text\n{help_of(('unisono',), whole)}\n```\n\n"
        f"```{{toctree}}\n:hidden:\n\n{listed}```\n"
    )
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
