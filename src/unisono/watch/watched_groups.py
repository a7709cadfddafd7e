"""The torch groups that this process watches: attach.py adds them, the monitor looks after them.

The monitor runs without torch, too, so this module does not import it.
"""

from __future__ import annotations

import weakref
from typing import Any

watched_groups: weakref.WeakSet[Any] = weakref.WeakSet()
"""Each is a WatchedProcessGroup, until nobody else holds it."""
