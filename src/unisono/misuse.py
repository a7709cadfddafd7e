"""The exception of every command for a request that cannot be met."""

import click


class Misuse(click.ClickException):
    """A request that cannot be met, in one sentence."""

    exit_code = 2
