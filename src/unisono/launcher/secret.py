"""`unisono secret`: a new secret, by which the ranks of a job recognise each other."""

from __future__ import annotations

import os
import secrets
import shlex

import click

from unisono.variables import JOB_SECRET_FILE


@click.command()
@click.argument("file", type=click.Path())
def secret(file: str) -> None:
    """Write a new secret for the ranks of your jobs to FILE.

    FILE must not exist; only you can read it. Every host needs the same: use a shared home, or copy
    it with its mode (scp -p). Then add the line that this prints to what starts the ranks.
    """
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise click.ClickException(f"{file} exists, and stays as it is: name another") from None
    except OSError as error:
        raise click.ClickException(f"{file}: {error.strerror}") from error
    with os.fdopen(descriptor, "w") as opened:
        opened.write(f"{secrets.token_hex(32)}\n")
    click.echo(f"export {JOB_SECRET_FILE.name}={shlex.quote(os.path.abspath(file))}")
