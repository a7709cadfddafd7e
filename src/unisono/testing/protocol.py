"""The messages between the controller and a rank's session, over a socket.

The controller sends a Start, then requests: the path of a file to collect, answered by Collected; a
RunTest, answered by Ran, Unable or Exit; None, which ends the session.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unisono.testing.assignment import RankAssignment

Warned = tuple[str, tuple[str, str], str, int, str, str, tuple[str, int, str] | None]
"""A warning from a test: text, module and name of its category, file and line; then when, node id
and location, as in `pytest_warning_recorded`."""


@dataclass(frozen=True)
class Start:
    """First message to a new rank. `folder` is the pool's, `worker_input` what pytest-xdist gave
    the controller if that is one of its workers, and what pytest-cov needs."""

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
class RunTest:
    """Run one test; `next_nodeid` is the rank's next one, if known."""

    nodeid: str
    next_nodeid: str | None
    assignment: RankAssignment


@dataclass(frozen=True)
class Ran:
    """The test has run: its reports, serialized by pytest, and its warnings."""

    reports: tuple[dict[str, Any], ...]
    warnings: tuple[Warned, ...]


@dataclass(frozen=True)
class Unable:
    """The test could not be run here, or the rank did not answer: it died, or was killed. If
    `broken`, the rank's session ends with this message."""

    headline: str
    detail: str = ""
    broken: bool = False


@dataclass(frozen=True)
class Exit:
    """The test called `pytest.exit`; the rank's session ends with this message."""

    reason: str
    returncode: int | None
