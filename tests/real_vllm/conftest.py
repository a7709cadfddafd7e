"""The programs of this folder import each other by name; without vLLM there is nothing to run."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "benchmarks")]
collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]
