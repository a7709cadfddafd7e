"""Tests that need a GPU, which all ranks share. `make test-gpu` runs them; without a GPU they are
skipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/tests/gpu/" in str(item.path):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What tests have measured."""
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    measured = [
        (report.nodeid, report.user_properties) for report in reports if report.user_properties
    ]
    if measured:
        terminalreporter.section("measured")
    for name, properties in measured:
        listed = ", ".join(f"{what} {value}" for what, value in properties)
        terminalreporter.write_line(f"{name.rpartition('/')[2]}: {listed}")
