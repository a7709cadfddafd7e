"""vLLM's workers over unisono generate the tokens that they generate over vLLM's own kernel
(`make real-vllm`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm

PROGRAM = Path(__file__).parents[2] / "benchmarks/serving.py"
SMALL = ["--layers", "2", "--hidden", "128", "--tokens", "12"]


def test_the_same_tokens(tmp_path: Path) -> None:
    environment = os.environ | {"VLLM_CACHE_ROOT": str(tmp_path)}
    command = [sys.executable, str(PROGRAM), *SMALL]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "the same tokens" in ended.stdout
