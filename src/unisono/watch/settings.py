"""The settings of the watch: from `unisono.watch.start`, or from the environment."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from unisono import variables
from unisono.errors import UnisonoError
from unisono.variables import Value, Variable

_log = logging.getLogger("unisono")

HANG_S = 30.0
"""How long a call waits before it is reported, by default."""


@dataclass(frozen=True)
class WatchSettings:
    """`hang_s`: how long a call may wait before it is reported. `check`: compare calls with the
    peers' before data moves. `folder`: where reports are saved, "" for nowhere. `sanitize`: start
    the sanitizer, too. `profile`: note waits."""

    hang_s: float = HANG_S
    check: bool = False
    folder: str = ""
    sanitize: bool = False
    profile: bool = False


def settings_of(
    hang_s: float | None = None,
    check: bool | None = None,
    *,
    forgiving: bool = False,
) -> WatchSettings:
    """The settings; None means the environment's.

    An invalid variable raises UnisonoError or, if `forgiving`, is ignored with a warning: if only
    the environment asked for the watch, the program must not fail because of it.
    """

    def read(variable: Variable[Value], default: Value) -> Value:
        value = variable.read_or_warn() if forgiving else variable.read()
        return default if value is None else value

    if hang_s is None:
        hang_s = read(variables.WATCH_HANG_S, HANG_S)
    if not hang_s > 0:
        raise ValueError(f"hang_s must be positive, not {hang_s}")
    if check is None:
        check = read(variables.WATCH_CHECK, False)
    folder = read(variables.WATCH_FOLDER, "")
    try:
        if folder:
            os.makedirs(folder, exist_ok=True)
    except OSError as error:
        must = "UNISONO_WATCH_FOLDER must be a folder, or a path for a new one"
        problem = f"{must}: {folder}: {error.strerror}"
        if not forgiving:
            raise UnisonoError(problem) from None
        _log.warning("%s: reports are not saved", problem)
        folder = ""
    more = read(variables.SANITIZE, False), read(variables.PROFILE, False)
    return WatchSettings(hang_s, check, folder, *more)
