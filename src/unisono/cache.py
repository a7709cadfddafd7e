"""The user's cache folder: where unisono keeps what can be measured again."""

from __future__ import annotations

import os

from unisono import variables


def cache_folder() -> str:
    """UNISONO_CACHE, $XDG_CACHE_HOME/unisono or ~/.cache/unisono; it need not exist."""
    chosen = variables.CACHE.read()
    if chosen is not None:
        return chosen
    base = os.environ.get("XDG_CACHE_HOME", "")
    home = base if os.path.isabs(base) else os.path.expanduser("~/.cache")
    return os.path.join(home, "unisono")
