"""Other people's trainers, and programs of their form, on unisono as on gloo (`make real`).

Four ranks, on however few cores: the same losses as on gloo, and steps that take no longer.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from real.figures import ratio_of_steps
from user_programs import plain_environment

pytestmark = pytest.mark.real

HERE = Path(__file__).parent
LONGEST_S = 900
SLOWEST = 0.95
"""gloo's step time over ours, the median of all turns: a smaller difference from 1 is noise."""

SHAPES = [
    "nanoGPT, DDP",
    *(f"picotron, {axis}4" for axis in ("dp", "pp", "cp", "tp")),
    *(
        f"picotron, {pair}"
        for pair in (
            "dp2 x pp2",
            "dp2 x cp2",
            "dp2 x tp2",
            "pp2 x cp2",
            "pp2 x tp2",
            "cp2 x tp2",
        )
    ),
]


def measure(folder: Path, script: str, *args: str) -> dict[str, Any]:
    """The measurements of four ranks of a script for one program."""
    found = folder / "found.json"
    run = [sys.executable, "-m", "unisono", "run", "-n", "4", "--threads", "1"]
    ended = subprocess.run(
        [*run, str(HERE / script), "--json", str(found), *args],
        env=plain_environment(),
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    result: dict[str, Any] = json.loads(found.read_text())[0]
    return result


@pytest.mark.parametrize("name", SHAPES)
def test_a_program_learns_the_same_in_no_more_time(tmp_path: Path, name: str) -> None:
    found = measure(tmp_path, "stepwise.py", "--steps", "20", name)
    assert found["unisono"]["losses"] == pytest.approx(found["gloo"]["losses"], rel=1e-4)
    if "alone" in found:
        assert found["unisono"]["losses"] == pytest.approx(found["alone"], rel=1e-4)
    assert found["unisono"]["losses"][-1] < found["unisono"]["losses"][0]
    assert ratio_of_steps(found) >= SLOWEST


@pytest.mark.parametrize("name", ["lightning", "fabric", "accelerate", "transformers"])
def test_a_trainer_learns_the_same_in_no_more_time(tmp_path: Path, name: str) -> None:
    needed = "lightning" if name == "fabric" else name
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed: make real")
    found = measure(tmp_path, "trainers.py", "--runs", "4", "--steps", "23", name)
    for ours, theirs in zip(found["unisono"]["losses"], found["gloo"]["losses"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
        assert ours[-1] < ours[0]
    assert ratio_of_steps(found) >= SLOWEST


@pytest.mark.parametrize("script", ["test_ops", "test_sync", "test_script"])
def test_accelerates_own_scripts(script: str) -> None:
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed: make real")
    run = [sys.executable, "-m", "unisono", "run", "-n", "2", "--threads", "1", "--replace", "gloo"]
    ended = subprocess.run(
        [*run, "-m", f"accelerate.test_utils.scripts.{script}"],
        env=plain_environment() | {"ACCELERATE_USE_CPU": "true", "HOME": os.environ["HOME"]},
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert ended.stderr.count("this program asks for gloo and gets unisono") == 1


@pytest.mark.parametrize(
    ("form", "printed"),
    [
        ("gloo", "DistributedDataParallel gloo unisono same"),
        ("wrapped", "DistributedDataParallel unisono unisono same"),
        ("bare", "Linear unisono unisono other"),  # if this changes, so does docs/programs.md
    ],
)
def test_ignite_wraps_a_model_if_the_backend_is_called_gloo(form: str, printed: str) -> None:
    if importlib.util.find_spec("ignite") is None:
        pytest.skip("pytorch-ignite is not installed: make real")
    run = [sys.executable, "-m", "unisono", "run", "-n", "2", "--threads", "1", "--no-prefix"]
    ended = subprocess.run(
        [*run, "--replace", "gloo", str(HERE / "ignite_model.py"), form],
        env=plain_environment(),
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert ended.stdout == printed + "\n"
