"""A finding: one thing that was looked at, how it stands, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How a thing stands. FAIL makes the command fail."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """`text` says what is there, `advice` in one sentence what to do; empty where all is well."""

    topic: str
    level: Level
    text: str
    advice: str = ""


def ok(topic: str, text: str) -> Finding:
    """All is well."""
    return Finding(topic, Level.OK, text)


def warn(topic: str, text: str, advice: str) -> Finding:
    """It works, but less well than it could, or it may surprise."""
    return Finding(topic, Level.WARN, text, advice)


def fail(topic: str, text: str, advice: str) -> Finding:
    """It does not work."""
    return Finding(topic, Level.FAIL, text, advice)
