"""`unisono doctor --topology`: a file that plan and layout read, with numbers of this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from unisono.cli import main
from unisono.plan import find_topology, rank_algorithms
from unisono.plan.layouts import Layout, Model, step_time


@pytest.mark.alone
def test_this_machine_becomes_a_topology(tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    done = CliRunner().invoke(main, ["doctor", "--topology", str(path)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert f"wrote {path}: " in done.output
    here = find_topology(str(path))
    assert here.name == "here"
    assert here.devices == here.node_size == len(os.sched_getaffinity(0))
    assert 1e8 < here.flops_per_s < 1e13
    assert 1e8 < here.memory_bytes_per_s < 1e12
    assert 0 <= here.layer_call_s < 0.1
    assert 0 < here.ring_call_s < 0.1
    assert 0 < here.inside_latency_s < 0.01
    assert rank_algorithms("all_reduce", 2, 1 << 20, here).best.time_s > 0
    model = Model(layers=2, width=64, heads=4, positions=32, vocabulary=128, precision="float32")
    assert step_time(model, Layout(dp=2), 4, here).time_s > 0


def test_what_cannot_be_written_is_said_before_measuring(tmp_path: Path) -> None:
    for arguments, sentence in (
        ([str(tmp_path / "no" / "here.toml")], "does not exist"),
        ([str(tmp_path / "here.toml"), "-n", "3"], "--ranks cannot be used with --topology"),
    ):
        refused = CliRunner().invoke(main, ["doctor", "--topology", *arguments])
        assert refused.exit_code == 2
        assert sentence in refused.stderr
