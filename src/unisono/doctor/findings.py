"""A finding: one thing that was looked at, how it stands, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """`text` says what is there, `advice` in one sentence what to do; empty where all is well.
    "warn": it works, but less well than it could, or may surprise. "fail": it does not work."""

    topic: str
    level: Level
    text: str
    advice: str = ""


def ok(topic: str, text: str) -> Finding:
    return Finding(topic, "ok", text)


def warn(topic: str, text: str, advice: str) -> Finding:
    return Finding(topic, "warn", text, advice)


def fail(topic: str, text: str, advice: str) -> Finding:
    return Finding(topic, "fail", text, advice)
