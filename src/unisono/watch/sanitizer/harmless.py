"""Looking must never change what the program does: a failure of ours is logged and dropped."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

_logger = logging.getLogger("unisono")


def harmless(look: Callable[..., Any]) -> Callable[..., Any]:
    """Return None where `look` raises."""

    @functools.wraps(look)
    def looked(*given: Any, **named: Any) -> Any:
        try:
            return look(*given, **named)
        except Exception:
            _logger.debug("unisono.watch: the sanitizer failed", exc_info=True)
            return None

    return looked
