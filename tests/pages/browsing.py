"""Opening pages in tests, and waiting for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

OpenPage = Callable[..., Any]


def until(page: Any, condition: str, seconds: float = 30) -> None:
    """Wait until an expression of the page is true. (Playwright's own function uses eval, which the
    pages forbid.)"""
    end = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < end, f"never true: {condition}"
        page.wait_for_timeout(20)
