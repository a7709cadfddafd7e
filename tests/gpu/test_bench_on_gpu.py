"""`unisono bench --device cuda`: every collective is right on both backends, on ranks that share
the GPU."""

from __future__ import annotations

import unisono


def test_every_collective_is_right_on_cuda_tensors() -> None:
    run = unisono.bench.measure_run("all", device="cuda", ranks=2, sizes="1K,2M", budget_s=0.01)
    assert run.finished
    assert not run.wrong
    assert run.machine["gpu"]
    ours = {row.collective for row in run.rows if row.backend == "unisono"}
    assert ours == set(run.settings["collectives"])
    assert [skipped.what for skipped in run.skipped if skipped.what == "nccl"] == ["nccl"]
