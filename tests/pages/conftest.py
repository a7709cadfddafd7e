"""Pages in a real browser: Debian's Chromium, driven by Playwright.

`make test-pages` runs all of it, `make test` runs test_at_a_glance.py; without a browser, both say
that they skip it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pages.browsing import CHROMIUM, OpenPage, start_browser


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.path.stem != "test_at_a_glance":
            item.add_marker(pytest.mark.pages)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    if not CHROMIUM:
        pytest.skip("needs Chromium: apt-get install chromium")
    pytest.importorskip(
        "playwright.sync_api", reason="needs playwright, which make test-pages installs"
    )
    with start_browser() as started:
        yield started


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[OpenPage]:
    """Opens a page from its text or file. By the end of the test the page must have reported no
    error and made no request."""
    troubles: list[str] = []
    contexts = []

    def open_in_browser(page: str | Path, *, width: int = 1280, scheme: str = "light") -> Any:
        if isinstance(page, str):
            file = tmp_path / "page.html"
            file.write_text(page, encoding="utf-8")
        else:
            file = page
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, has_touch=width < 700
        )
        contexts.append(context)
        opened = context.new_page()
        opened.on("console", lambda message: troubles.append(f"{message.type}: {message.text}"))
        opened.on("pageerror", lambda error: troubles.append(f"error: {error}"))
        opened.on(
            "request",
            lambda request: (
                troubles.append(f"request: {request.url}")
                if request.url != file.as_uri() and not request.url.startswith(("data:", "blob:"))
                else None
            ),
        )
        opened.goto(file.as_uri())
        return opened

    yield open_in_browser
    for context in contexts:
        context.close()
    assert troubles == []
