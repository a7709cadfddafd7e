"""What a self-test found."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from unisono.wording import name_number


@dataclass(frozen=True)
class Check:
    """One primitive: whether it did what it promises, how long a call took, what went wrong."""

    primitive: str
    ok: bool
    microseconds: float
    message: str = ""


@dataclass(frozen=True)
class SelfTest:
    """What `debug_communication` found: the same verdicts on every rank, times of this one.

    `group` is the name of the group, `backend` what moves its data, `rank` and `size` this rank and
    the number of ranks; `checks` has an entry for each primitive.

    >>> test = unisono.debug_communication(repeats=1, show=False)
    >>> test.ok, test.size
    (True, 2)
    """

    group: str
    backend: str
    rank: int
    size: int
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether every primitive was right on every rank."""
        return all(check.ok for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values, for JSON.

        >>> unisono.debug_communication(repeats=1, show=False).as_dict()["ok"]
        True
        """
        return {**asdict(self), "ok": self.ok}

    def __str__(self) -> str:
        lines = [f"group {self.group}: {name_number(self.size, 'rank')} on {self.backend}"]
        for check in self.checks:
            verdict = "ok   " if check.ok else "WRONG"
            took = "" if math.isnan(check.microseconds) else f"{check.microseconds:10.1f} us"
            lines.append(f"  {verdict} {check.primitive:<22}{took:>13}  {check.message}".rstrip())
        wrong = sum(not check.ok for check in self.checks)
        lines.append("  all right" if self.ok else f"  {wrong} of {len(self.checks)} are wrong")
        return "\n".join(lines)
