"""Progress of commands that think for a while."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
from rich.console import Console

_QUIET_S = 5.0
"""How often progress is printed if stderr is not a terminal."""


@contextmanager
def show_progress(ranks: int) -> Iterator[Callable[[str], None]]:
    """Show progress on stderr: a spinner on a terminal, otherwise a line now and then."""
    what = f"simulating {ranks:,} ranks"
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(what) as status:
            yield lambda text: status.update(f"{what}: {text}")
        return
    shown_s = [time.monotonic()]

    def say(text: str) -> None:
        if time.monotonic() - shown_s[0] > _QUIET_S:
            shown_s[0] = time.monotonic()
            click.echo(f"{what}: {text}", err=True)

    yield say
