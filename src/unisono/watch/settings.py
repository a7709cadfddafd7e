"""What the watch is told: by `unisono.watch.start`, or by the environment."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from unisono.errors import UnisonoError
from unisono.watch.desk import DEFAULT_SIGNAL

HANG_S = 30.0
"""How long a call waits before a report, unless told otherwise."""


@dataclass(frozen=True)
class Settings:
    """`hang_s`: how long a call may wait before it is reported. `check`: compare calls with the
    peers' before data moves. `stack_signal`: the reserved signal, 0 for none. `folder`: where
    reports are saved, "" for nowhere."""

    hang_s: float = HANG_S
    check: bool = False
    stack_signal: int = DEFAULT_SIGNAL
    folder: str = ""


def settings_of(
    hang_s: float | None = None, check: bool | None = None, stack_signal: int | None = None
) -> Settings:
    """The settings; what is None comes from the environment."""
    if hang_s is None:
        hang_s = _number("UNISONO_WATCH_HANG_S", HANG_S)
    if hang_s <= 0:
        raise ValueError(f"hang_s must be above zero, not {hang_s}")
    if check is None:
        check = os.environ.get("UNISONO_WATCH_CHECK", "0") == "1"
    if stack_signal is None:
        stack_signal = _signal(os.environ.get("UNISONO_WATCH_SIGNAL", ""))
    return Settings(
        hang_s, check, stack_signal, _folder(os.environ.get("UNISONO_WATCH_FOLDER", ""))
    )


def is_wanted() -> bool:
    """Whether the environment asks for the watch."""
    return os.environ.get("UNISONO_WATCH", "0") not in ("", "0")


def _number(variable: str, default: float) -> float:
    text = os.environ.get(variable, "")
    try:
        return float(text) if text else default
    except ValueError:
        raise UnisonoError(f"{variable} must be a number of seconds, not {text!r}") from None


def _folder(path: str) -> str:
    """The folder, made where it is not there; absolute, for the program may go elsewhere."""
    if path:
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as error:
            raise UnisonoError(
                f"UNISONO_WATCH_FOLDER must be a folder, or a place for one: {path}: "
                f"{error.strerror}"
            ) from None
    return os.path.abspath(path) if path else ""


def _signal(text: str) -> int:
    if not text:
        return DEFAULT_SIGNAL
    if text.isdigit():
        return int(text)
    try:
        return signal.Signals[text.upper()]
    except KeyError:
        raise UnisonoError(
            f"UNISONO_WATCH_SIGNAL must be a signal's name or number, or 0, not {text!r}"
        ) from None
