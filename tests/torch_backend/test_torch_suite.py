"""The driver of torch's own suite: known results are kept, the rest is run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow
HERE = Path(__file__).parents[1]


def run(folder: Path, *arguments: str, hosts: int = 1) -> list[dict[str, str]]:
    """Run a few tests on unisono, on 3 ranks of each host; returns the known results."""
    command = [sys.executable, "-m", "torch_suite", "--backend", "unisono"]
    command += ["--ranks", str(3 * hosts), "--hosts", str(hosts)]
    subprocess.run(
        [*command, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(HERE)},
        check=True,
        timeout=180,
        stdout=subprocess.DEVNULL,
    )
    (path,) = folder.glob("build/conformance/*/unisono-*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_that_was_cut_off_goes_on(tmp_path: Path) -> None:
    known = run(tmp_path, "--only", "test_get_rank")
    names = ["test_get_rank", "test_get_rank_size_group", "test_get_rank_size_full_group"]
    assert [(result["test"], result["status"]) for result in known] == [
        (name, "passed") for name in names
    ]
    (path,) = tmp_path.glob("build/conformance/*/unisono-3.jsonl")
    path.write_bytes(path.read_bytes()[:-10])
    again = run(tmp_path, "--only", "test_get_rank")
    assert again[:2] == known[:2]  # kept, not run again: the times are the same
    assert [result["test"] for result in again] == names
    assert again[2]["status"] == "passed"


def test_over_two_hosts(tmp_path: Path) -> None:
    known = run(tmp_path, "--only", "test_all_reduce_sum", hosts=2)
    assert {result["test"]: result["status"] for result in known} == {
        "test_all_reduce_sum": "passed",
        "test_all_reduce_sum_async": "passed",
        "test_all_reduce_sum_complex": "passed",
        "test_all_reduce_sum_cuda": "skipped",
        "test_all_reduce_sum_cuda_async": "skipped",
        "test_all_reduce_sum_cuda_complex": "skipped",
    }


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="these tests can run here")
def test_what_needs_a_gpu_is_skipped_without_ranks(tmp_path: Path) -> None:
    known = run(tmp_path, "--only", "test_ddp_native_mixed_precision")
    assert known
    assert {(result["status"], result["reason"], result["seconds"]) for result in known} == {
        ("skipped", "Need at least 2 CUDA devices", 0.0)
    }
