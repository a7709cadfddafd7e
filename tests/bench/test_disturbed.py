"""benchmarks/disturbed.py runs, disturbs in every way, and leaves no process behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "disturbed.py"


def test_calls_are_disturbed_in_every_way(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    options = ["--backends", "unisono", "--ranks", "2", "--seconds", "0.2", "--times", "1"]
    command = [sys.executable, str(PROGRAM), *options, "--json", str(path)]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())["rows"]
    assert [row["scenario"] for row in rows] == [
        "half of the cores",
        "all cores",
        "one rank stopped",
    ]
    for row in rows:
        assert row["disturbances"] >= 1
        assert 0 < row["median_us"] <= row["p95_us"]
        assert row["scenario"] in done.stdout
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert str(tmp_path) not in running.stdout  # where the ranks' folder was


def test_an_unknown_backend_is_refused() -> None:
    command = [sys.executable, str(PROGRAM), "--backends", "smoke signals"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "no backend 'smoke signals': choose from unisono, mpi-spins, mpi-yields" in done.stderr
