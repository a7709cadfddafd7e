"""How a rank of a launch ended, as the exceptions about it tell."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankEnding:
    """How one rank of a launch ended: `rank`, and whether it `failed`.

    `how` says it in a few words. `traceback` is that of an exception, `stack` where the rank was
    when it crashed or was ended, `exit_code` as a shell would have it (128 + the signal's number),
    `signal` the name of a signal that it died of, `stdout` and `stderr` the last of what it wrote,
    `host` the name of its host, "" where all are on this machine.

    >>> unisono.RankEnding(rank=1, how="was killed", failed=True, exit_code=137).how
    'was killed'
    """

    rank: int
    how: str
    failed: bool
    exit_code: int
    signal: str = ""
    traceback: str = ""
    stack: str = ""
    stdout: str = ""
    stderr: str = ""
    host: str = ""
