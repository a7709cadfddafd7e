"""What every command refuses: a request that cannot be met, and a file that cannot be written."""

from pathlib import Path

import click


class Misuse(click.ClickException):
    """A request that cannot be met, in one sentence."""

    exit_code = 2


def check_writable(path: Path) -> None:
    """See whether a file can be written there, before the work of which it is to tell.

    Raises Misuse.
    """
    if path.is_dir():
        raise Misuse(f"{path} is a folder, and a file was to be written there")
    if not path.resolve().parent.is_dir():
        raise Misuse(f"the folder of {path} does not exist")
    existed = path.exists()
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        raise Misuse(f"{path} cannot be written: {error.strerror}") from error
    if not existed:
        path.unlink()
