"""The engine's groups whose communicators are gone.

A group ends with its last reference; works that nobody waited for hold one, until they are done
and somebody looks: whenever a communicator comes or goes, in any thread, at any moment.
"""

from __future__ import annotations

import contextlib
from typing import Any

_abandoned_groups: list[Any] = []


def abandon_group(group: Any) -> None:
    """Let a group end once its works are done."""
    _abandoned_groups.append(group)
    end_abandoned_groups()


def end_abandoned_groups() -> None:
    """Let go of the groups whose works are done."""
    for group in list(_abandoned_groups):
        if not group.release_works():
            with contextlib.suppress(ValueError):  # another thread was faster
                _abandoned_groups.remove(group)
