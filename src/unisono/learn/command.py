"""`unisono learn`: the exercises of the course."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

import click

from unisono.errors import RanksFailed
from unisono.learn.checks import CHAPTERS, Chapter
from unisono.torch_support import require_torch

_EXERCISES = Path(__file__).parent / "exercises"
_TIMEOUT_S = 120.0
_CALL_S = 10.0
_folder = click.option(
    "--folder",
    default="course",
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Where your copies are.",
)


@click.group(invoke_without_command=True)
@click.pass_context
def learn(context: click.Context) -> None:
    """Exercises of the course "Collectives from zero".

    Without a command: list the chapters. `unisono learn start` copies the exercises into a folder.
    Fill one in, and `unisono learn check 1` runs it on real ranks.
    """
    if context.invoked_subcommand is None:
        for number, chapter in enumerate(CHAPTERS, 1):
            click.echo(f"{number:3}  {chapter.title}")
        click.echo("\nunisono learn start     copy the exercises into the folder course")
        click.echo("unisono learn check 1   check one of them")


@learn.command()
@_folder
def start(folder: Path) -> None:
    """Copy the exercises. Files that are there already are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    new = [file for file in sorted(_EXERCISES.glob("*.py")) if not (folder / file.name).exists()]
    for file in new:
        shutil.copyfile(file, folder / file.name)
    click.echo(f"{len(new)} exercises copied into {folder}; begin with {folder}/chapter_01.py")


@learn.command()
@click.argument("chapters", nargs=-1, type=click.IntRange(1, len(CHAPTERS)))
@_folder
def check(chapters: tuple[int, ...], folder: Path) -> None:
    """Check the exercises of CHAPTERS, or all of them. Fails if one is not solved."""
    require_torch("the course")
    solved = 0
    numbers = chapters or range(1, len(CHAPTERS) + 1)
    for number in numbers:
        chapter, file = CHAPTERS[number - 1], folder / f"chapter_{number:02}.py"
        if not file.exists():
            raise click.ClickException(f"there is no {file}: run `unisono learn start` first")
        problem = _problem(chapter, number, file)
        solved += problem is None
        click.echo(f"{number:3}  {chapter.title}: {problem or 'solved'}")
        if problem and problem != _NOT_YET:
            click.echo(f"     hint: {chapter.hint}")
    if solved < len(numbers):
        sys.exit(1)


_NOT_YET = "not written yet"


def _problem(chapter: Chapter, number: int, file: Path) -> str | None:
    """What is wrong with the reader's file, or None."""
    from unisono.launcher.functions import launch

    try:
        if not chapter.ranks:
            chapter.check(_load(file))
        for ranks in chapter.ranks:
            launch(
                _check_on_rank,
                ranks,
                args=(number, file),
                threads=1,
                timeout=_TIMEOUT_S,
                capture=True,
            )
    except RanksFailed as error:
        said = str(error).partition("\n")[0].replace(": AssertionError:", ":")
        return _NOT_YET if "NotImplementedError" in said else said
    except NotImplementedError:
        return _NOT_YET
    except AssertionError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _check_on_rank(number: int, file: Path) -> None:
    from unisono.world.world import init

    CHAPTERS[number - 1].check(_load(file), init(timeout_s=_CALL_S))


def _load(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
