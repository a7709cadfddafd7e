"""These tests import programs beside them by name; without vLLM there is nothing to run."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_HERE = Path(__file__).parent
_BESIDE = _HERE, _HERE.parent / "hosts", _HERE.parents[1] / "benchmarks"
sys.path[:0] = [str(folder) for folder in _BESIDE]
collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]
