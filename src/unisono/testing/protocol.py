"""What the controller and the session of a rank say to each other, over a socket of their own.

The controller sends a Start, then requests: the path of a file to collect, answered by Collected; a
Run, answered by Ran, Unable or Exit; None, with which the session ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unisono.testing.membership import Membership

Warned = tuple[str, tuple[str, str], str, int, str, str, tuple[str, int, str] | None]
"""A warning that a test gave: text, module and name of its category, file and line; when, node id
and location, as `pytest_warning_recorded` has them."""


@dataclass(frozen=True)
class Start:
    """First message to a new rank. `folder` is the pool's, `worker_input` what pytest-xdist gave
    the controller where that is one of its workers, and what pytest-cov needs to know."""

    rank: int
    sys_path: tuple[str, ...]
    argv: tuple[str, ...]
    folder: str
    worker_input: Mapping[str, Any]


@dataclass(frozen=True)
class Collected:
    """The file is collected; `error` says what went wrong, if anything."""

    error: str | None


@dataclass(frozen=True)
class Run:
    """Run one test; `next_nodeid` is the rank's next one, as far as is known."""

    nodeid: str
    next_nodeid: str | None
    membership: Membership


@dataclass(frozen=True)
class Ran:
    """The test has run: its reports as pytest writes them down, and its warnings."""

    reports: tuple[dict[str, Any], ...]
    warnings: tuple[Warned, ...]


@dataclass(frozen=True)
class Unable:
    """The test could not be run here, or the rank brought no answer: it died, or had to be ended.
    Where `broken`, the rank's session ends with this message."""

    headline: str
    detail: str = ""
    broken: bool = False


@dataclass(frozen=True)
class Exit:
    """The test called `pytest.exit`; the rank's session ends with this message."""

    reason: str
    returncode: int | None
