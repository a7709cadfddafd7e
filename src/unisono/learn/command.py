"""`unisono learn`: the exercises of the course."""

from __future__ import annotations

import re
import runpy
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from unisono.errors import RanksFailed
from unisono.torch_support import require_torch

_EXERCISES = sorted((Path(__file__).parent / "exercises").glob("*.py"))
_TITLES = [file.read_text().partition("\n")[0].strip('"') for file in _EXERCISES]
_NOT_YET = "not written yet"
_TIMEOUT_S, _CALL_S = 120.0, 10.0
_PATH = click.Path(file_okay=False, path_type=Path)
_folder = click.option("--folder", default="course", type=_PATH, help="Your copies: course.")


@click.group(invoke_without_command=True)
@click.pass_context
def learn(context: click.Context) -> None:
    """Exercises of the course "Collectives from zero".

    Without a command: list the chapters. `unisono learn start` copies the exercises into a folder.
    Fill one in, and `unisono learn check 1` runs it on real ranks.
    """
    if context.invoked_subcommand is None:
        click.echo("\n".join(_TITLES))
        click.echo("\nunisono learn start     copy the exercises into the folder course")
        click.echo("unisono learn check 1   check one of them")


@learn.command()
@_folder
def start(folder: Path) -> None:
    """Copy the exercises. Files that are there already are kept."""
    new = [file for file in _EXERCISES if not (folder / file.name).exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in new:
            shutil.copyfile(file, folder / file.name)
    except OSError as error:
        raise click.ClickException(f"cannot write {error.filename}: {error.strerror}") from error
    kept = len(_EXERCISES) - len(new)
    done = f"{len(new)} exercises copied into {folder}" + f"; {kept} kept" * bool(kept)
    click.echo(f"{done}; begin with {folder}/chapter_01.py")


@learn.command()
@click.argument("chapters", nargs=-1, type=click.IntRange(1, len(_EXERCISES)))
@_folder
def check(chapters: tuple[int, ...], folder: Path) -> None:
    """Check the exercises of CHAPTERS, or all of them. Fails if one is not solved."""
    require_torch("the course")
    from unisono.learn.checks import CHECKS

    solved = True
    for number in chapters or range(1, len(_EXERCISES) + 1):
        file = folder / f"chapter_{number:02}.py"
        if not file.is_file():
            how = f"unisono learn start --folder {folder}"
            raise click.ClickException(f"there is no file {file}: run `{how}` first")
        run, sizes = CHECKS[number - 1]
        problem = _problem(run, sizes, file)
        click.echo(f"{_TITLES[number - 1]}: {problem or 'solved'}")
        if problem and problem != _NOT_YET:
            click.echo(f"hint: {' '.join((run.__doc__ or '').split())}")
        solved = solved and not problem
    if not solved:
        sys.exit(1)


class _Names:
    """The names that the reader's file defines, as attributes."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.__dict__.update(runpy.run_path(str(file)))

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{self._file.name} does not define {name}")


def _problem(run: Callable[..., None], sizes: tuple[int, ...], file: Path) -> str | None:
    """What is wrong with the reader's file, or None."""
    from unisono.launcher.functions import launch

    try:
        if not sizes:
            run(_Names(file))
        for ranks in sizes:
            launch(_check, ranks, args=(run, file), threads=1, timeout=_TIMEOUT_S)
    except (Exception, SystemExit) as error:
        is_told = isinstance(error, AssertionError | RanksFailed)
        said = str(error) if is_told else f"{type(error).__name__}: {error}"
        said = said.partition("\n")[0].replace(": AssertionError:", ":")
        if "NotImplementedError" in said:
            return _NOT_YET
        story = traceback.format_exc()
        if isinstance(error, RanksFailed):
            story = error.endings[error.first].traceback
        lines = re.findall(rf'{re.escape(file.name)}", line (\d+)', story)
        where = f" ({file.name}, line {lines[-1]})" if lines and ", line " not in said else ""
        return said + where
    return None


def _check(run: Callable[..., None], file: Path) -> None:
    from unisono.world.world import init

    run(_Names(file), init(timeout_s=_CALL_S))
