"""torchft's Manager on our process group, and its own tests of process groups (`make real`)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from user_programs import run_python

EXAMPLE = Path(__file__).parents[2] / "examples/replicas.py"
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        importlib.util.find_spec("torchft") is None, reason="torchft is not installed: make real"
    ),
]


def test_a_replica_is_killed_and_comes_back() -> None:
    ran = run_python(str(EXAMPLE), timeout_s=300)
    assert "they have the same parameters" in ran.stdout, ran
