"""Opening pages in tests, and waiting for them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

OpenPage = Callable[..., Any]

_NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in _NAMES if (path := shutil.which(name))), "")


@contextmanager
def start_browser() -> Iterator[Any]:
    """A browser, for the thread that starts it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


def until(page: Any, condition: str, seconds: float = 30) -> None:
    """Wait until an expression of the page is true. (Playwright's own function uses eval, which the
    pages forbid.)"""
    end = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < end, f"never true: {condition}"
        page.wait_for_timeout(20)
