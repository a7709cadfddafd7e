"""What a mutant is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """In `file`, `old` becomes `new`; it stands there once. `why` says what a user would lose, and
    `tests` who should notice: a test for pytest, or "threads NAME", a test of tests/native, or
    "race NAME", the same under ThreadSanitizer. `equivalent` argues that nobody can."""

    name: str
    file: str
    old: str
    new: str
    why: str
    tests: tuple[str, ...]
    equivalent: str = ""
