"""A rank that the others keep waiting for is named, with the phase that it is in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from made_up_records import group, record
from torch.nn.parallel import DistributedDataParallel

from unisono import watch
from unisono.comm.shared_memory.records import GroupRecords, Process, Record
from unisono.watch import steps
from unisono.watch.slow import Slowness
from unisono.watch.top import Verdicts
from unisono.watch.whereabouts import Whereabouts

CALLS = range(1, 31)


def late(calls: range, by_s: float) -> GroupRecords:
    """Rank 2 is late for these, out of thirty."""
    quick = [*map(record, CALLS), record(31, "waiting")]
    slow = [record(n, arrived_s=n + (by_s if n in calls else 0.0)) for n in CALLS]
    return group(quick, quick, slow)


def loading(process: Process) -> Whereabouts:
    return Whereabouts(location="data.py:41 in load", doing="read", in_call=False, phase="data")


def test_the_sentence() -> None:
    known = Slowness()
    known.look(late(CALLS, 0.3), loading)
    report = known.report(late(CALLS, 0.3))
    assert report is not None
    assert report.verdict == (
        "rank 2 is slow: all others waited for it in 30 of 30 calls of group dp, 300 ms per call, "
        "9 of 15 s (60%); 1 of 1 times it was in data.py:41, in read (phase: data)"
    )
    assert (report.culprits, report.site) == ((2,), "data.py:41")


def test_what_waits_at_the_same_time_counts_once() -> None:
    """All calls are begun at once, and rank 2 comes to one each second."""
    early = [record(n, arrived_s=0.5) for n in CALLS]
    known, calls = Slowness(), group(early, early, [*map(record, CALLS)])
    known.look(calls, loading)
    report = known.report(calls)
    assert report is not None
    assert "waited for it in 30 of 30 calls of group dp, 983 ms per call, 29.5 of 30 s (98%)" in (
        report.verdict
    )


def test_steps_are_judged_and_not_calls() -> None:
    """Of the three calls of a step the others wait in one."""

    def calls(by_s: float) -> list[Record]:
        late_s = [0.0, by_s, 0.0]
        return [record(n, arrived_s=n + late_s[n % 3], site=f"t.py:{n % 3}") for n in CALLS]

    known, seen = Slowness(), group(calls(0.0), calls(0.0), calls(0.3))
    known.look(seen, loading)
    report = known.report(seen)
    assert report is not None
    assert "rank 2 is slow: all others waited for it in 10 of 10 steps" in report.verdict
    assert "300 ms per step, 3 of 15 s (20%)" in report.verdict


def test_one_long_wait_is_no_slow_rank() -> None:
    known = Slowness()
    known.look(late(range(5, 6), 0.45), loading)
    assert known.report(late(range(5, 6), 0.45)) is None


def test_the_last_stage_of_a_pipeline_is_not_slow() -> None:
    """It comes last because its input does."""
    known = Slowness()
    stages = late(CALLS, 0.3)
    input_ = {"operation": "recv", "call": None, "tag": 0, "peer": 1}
    received = [record(n, arrived_s=n - 0.3, ended_s=n, **input_) for n in CALLS]
    members = [[*member.records] for member in stages.ranks]
    pipeline = group(*members[:2], [*members[2], *received])
    known.look(pipeline, loading)
    assert known.report(pipeline) is None


def test_top_tells_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unisono.watch.top._where", loading)
    done = late(CALLS, 0.3)
    done = group(*[[*member.records[:30]] for member in done.ranks])  # no rank waits now
    report = Verdicts().of([done])
    assert report is not None
    assert report.verdict.startswith("rank 2 is slow: all others waited for it in 30 of 30 calls")


@pytest.mark.ranks(2)
def test_hooks_tell_the_phase(process_group: Any) -> None:
    watch.start()
    seen: list[str] = []

    class Layer(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(steps.phase)
            return super().forward(x)

    model = DistributedDataParallel(Layer(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def note() -> float:
        seen.append(steps.phase)
        return 0.0

    for _ in range(2):
        loss = model(torch.ones(2, 4)).sum()
        seen.append(steps.phase)
        loss.backward()
        optimizer.step(note)
        seen.append(steps.phase)
    assert seen == ["forward", "backward", "optimizer", "data"] * 2
