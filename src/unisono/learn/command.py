"""`unisono learn`: the course, chapter by chapter."""

import sys
import webbrowser
from pathlib import Path

import click

from unisono.learn.chapters import Chapter, chapters, page_name
from unisono.learn.progress import Progress
from unisono.torch_support import require_torch

_MOST_COLUMNS = 100
_folder = click.option(
    "--folder",
    default="course",
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Where your exercises are.",
)
_html = click.option("--html", is_flag=True, help="Show the chapter in the browser.")


class _Number(click.ParamType[Chapter]):
    name = "chapter"

    def convert(self, value: object, param: object, context: object) -> Chapter:
        numbers = [str(chapter.number) for chapter in chapters()]
        if str(value) not in numbers:
            self.fail(f"there is no chapter {value}: there are 1 to {len(numbers)}")
        return chapters()[numbers.index(str(value))]


@click.group(invoke_without_command=True)
@_folder
@_html
@click.pass_context
def learn(context: click.Context, folder: Path, html: bool) -> None:
    """The course "Collectives from zero": read, solve, check, go on.

    Without a command, go on where you left off: show the next chapter and write its exercise into
    a folder, or check the exercise that is there. It needs no network.
    """
    context.default_map = {name: {"folder": folder} for name in ("list", "show", "check")}
    if context.invoked_subcommand is not None:
        return
    progress = Progress(folder)
    chapter = _next(progress)
    if chapter is None:
        _tell_next(progress)
        return
    file = progress.file(chapter)
    if html or not progress.is_begun(chapter):
        _show(chapter, progress, html)
        _hand_out(chapter, progress)
        click.echo(f"Your exercise: {file}. Edit it, then run `unisono learn` again.")
    elif _check(chapter, progress):
        _tell_next(progress)
    else:
        click.echo(f"Edit {file} and run `unisono learn` again.")
        click.echo(f"`unisono learn show {chapter.number}` shows the chapter.")
        sys.exit(1)


@learn.command("list")
@_folder
def list_(folder: Path) -> None:
    """List the chapters, and which are solved."""
    solved = Progress(folder).solved
    for chapter in chapters():
        click.echo(f"{chapter.title}{'  (solved)' if chapter.number in solved else ''}")


@learn.command()
@click.argument("chapter", type=_Number())
@_folder
@_html
def show(chapter: Chapter, folder: Path, html: bool) -> None:
    """Show CHAPTER and write its exercise."""
    progress = Progress(folder)
    _show(chapter, progress, html)
    _hand_out(chapter, progress)
    click.echo(f"Your exercise: {progress.file(chapter)}")


@learn.command()
@click.argument("chosen", metavar="[CHAPTER]...", nargs=-1, type=_Number())
@_folder
def check(chosen: tuple[Chapter, ...], folder: Path) -> None:
    """Check the exercises of chapters, or all that you have begun.

    The exit code is 1 if one is not solved.
    """
    progress = Progress(folder)
    begun = chosen or tuple(one for one in chapters() if progress.file(one).exists())
    if not begun:
        raise click.ClickException(f"no exercise is in {folder}: `unisono learn` writes the first")
    for chapter in begun:
        if not progress.file(chapter).is_file():
            how = f"`unisono learn show {chapter.number}` writes it"
            raise click.ClickException(f"there is no file {progress.file(chapter)}: {how}")
    solved = [_check(chapter, progress) for chapter in begun]
    if not all(solved):
        sys.exit(1)
    _tell_next(progress)


@learn.command()
@click.argument("chapter", type=_Number())
def solution(chapter: Chapter) -> None:
    """Print a solution of CHAPTER's exercise."""
    click.echo(chapter.solution, nl=False)


def _show(chapter: Chapter, progress: Progress, html: bool) -> None:
    if html:
        folder = progress.folder / "pages"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for one in chapters():
                (folder / page_name(one.number)).write_text(one.page(), encoding="utf-8")
        except OSError as error:
            raise _unwritable(error) from error
        page = (folder / page_name(chapter.number)).resolve()
        is_open = webbrowser.open(page.as_uri())
        click.echo(f"{chapter.title}: {page}" if is_open else f"Open {page} in a browser.")
        return
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console(soft_wrap=False)
    console.width = min(console.width, _MOST_COLUMNS)
    with console.capture() as captured:
        console.print(Markdown(chapter.for_terminal(), hyperlinks=False))
    click.echo_via_pager(captured.get())


def _hand_out(chapter: Chapter, progress: Progress) -> None:
    try:
        progress.hand_out(chapter)
    except OSError as error:
        raise _unwritable(error) from error


def _unwritable(error: OSError) -> click.ClickException:
    what = f"cannot write {error.filename}: {error.strerror}"
    return click.ClickException(
        f"{what}\nGo to a folder of your own, or name one: unisono learn --folder ~/course"
    )


def _check(chapter: Chapter, progress: Progress) -> bool:
    """Check a chapter's exercise and print what is wrong with it."""
    require_torch("the course")
    from unisono.learn.checking import verdicts

    click.echo(chapter.title)
    is_solved = True
    for function, problem, hint in verdicts(chapter, progress.file(chapter)):
        click.echo(f"  {function}: {problem or 'solved'}".replace("\n", "\n    "))
        if hint:
            click.echo(f"    hint: {hint}")
        is_solved = is_solved and not problem
    try:
        progress.note(chapter, is_solved)
    except OSError as error:
        raise _unwritable(error) from error
    return is_solved


def _next(progress: Progress) -> Chapter | None:
    """The first chapter that is not solved."""
    return next((one for one in chapters() if one.number not in progress.solved), None)


def _tell_next(progress: Progress) -> None:
    chapter = _next(progress)
    if chapter is None:
        click.echo("All chapters are solved. `unisono learn list` names them.")
    else:
        click.echo(f"Next: {chapter.title}. Run `unisono learn`.")
