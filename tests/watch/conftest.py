"""Every test of the watch leaves it in the state that the test run needs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from unisono import watch
from unisono.variables import watch_is_wanted
from unisono.watch import steps


@pytest.fixture(autouse=True)
def _afterwards_as_before() -> Iterator[None]:
    yield
    watch.stop()
    steps.are_counted = steps.are_marked = False
    if watch_is_wanted():
        watch.start()
