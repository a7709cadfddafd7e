"""Profiles: where the time of a step goes. Invented records are right to the microsecond, programs
that sleep within a part of a step."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from made_up_records import group, record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

import unisono
from unisono import watch
from unisono.comm.communicator import Communicator
from unisono.comm.engine import works
from unisono.comm.shared_memory.records import Record
from unisono.watch.profiles import Profile, build_profile
from unisono.watch.waits import BACKWARD, LEFT_RUNNING, STEP, WAIT, WaitNote, notes_of
from user_programs import WriteProgram

MIB = 1 << 20
STEPS = 4


def call(number: int, begin_s: float, end_s: float, **more: object) -> Record:
    fields: dict[str, object] = {"arrived_s": begin_s, "ended_s": end_s, "thread": 1}
    return record(number, **(fields | {"site": "train.py:7 in step", **more}))  # type: ignore[arg-type]


def left_running(own: Sequence[Record]) -> list[WaitNote]:
    return [WaitNote(LEFT_RUNNING, one.arrived_s, one.arrived_s) for one in own]


def marks() -> list[WaitNote]:
    return [WaitNote(STEP, float(step), float(step)) for step in range(STEPS + 1)]


def profiled(calls: Sequence[list[Record]], notes: Sequence[list[WaitNote]]) -> Profile:
    """Of ranks whose steps take a second."""
    processes = {("", 100 + rank): [*own, *marks()] for rank, own in enumerate(notes)}
    return build_profile([group(*calls)], processes)


def shares(profile: Profile, rank: int) -> list[float]:
    """Hidden, exposed and lost, in microseconds."""
    step = profile.typical[rank]
    assert step.wall_s == pytest.approx(1)
    assert step.step == STEPS
    assert step.computation_s + step.exposed_s == pytest.approx(step.wall_s)
    return [round(seconds * 1e6) for seconds in (step.hidden_s, step.exposed_s, step.lost_s)]


@pytest.mark.parametrize("overlap", [0.0, 0.5, 1.0])
def test_what_computation_hides_of_a_call_is_apart_from_what_is_waited_for(overlap: float) -> None:
    calls = [[call(n + 1, n + 0.2, n + 0.6) for n in range(STEPS)] for _ in range(2)]
    waits = [WaitNote(WAIT, n + 0.2 + overlap * 0.4, n + 0.6) for n in range(STEPS)]
    profile = profiled(calls, [left_running(own) + waits for own in calls])
    for rank in range(2):
        expected = [round(overlap * 400e3), round((1 - overlap) * 400e3), 0]
        assert shares(profile, rank) == expected
    (row,) = profile.calls
    assert (row.is_blocking, row.count, row.line) == (False, 1, "train.py:7")
    assert [row.duration_s, row.hidden_s] == pytest.approx([0.4, overlap * 0.4])
    assert not profile.advice


def test_a_straggler_costs_the_others_what_they_wait_for_it() -> None:
    """Rank 2 is 80 ms late to blocking calls, which take 10 ms from then on."""
    late = 0, 0, 0.08
    calls = [[call(n + 1, n + 0.2 + by, n + 0.29) for n in range(STEPS)] for by in late]
    profile = profiled(calls, [[], [], []])
    assert shares(profile, 0) == shares(profile, 1) == [0, 90_000, 80_000]
    assert shares(profile, 2) == [0, 10_000, 0]
    assert [step.lost_to for step in profile.typical] == [2, 2, -1]
    assert len(profile.advice) == 1
    assert profile.advice[0].startswith("Look at rank 2: a rank waits for it for 53.3 ms of a step")
    tables = str(profile).partition("\n\nLook at")[0].splitlines()
    assert "rank 2" in tables[2]
    assert "rank 2" in tables[-1]
    assert max(map(len, tables)) <= 80


def test_a_blocking_call_that_moves_data_is_worth_a_sentence_with_its_line() -> None:
    calls = [[call(n + 1, n + 0.2, n + 0.5) for n in range(STEPS)]] * 2
    (advice,) = profiled(calls, [[], []]).advice
    assert advice.startswith("Make all_reduce asynchronous at train.py:7: it blocks for 300 ms")


@pytest.mark.parametrize(("mib", "advised"), [(1, True), (25, False), (200, True)])
def test_the_size_of_buckets_is_simulated_with_the_calls_of_the_run(
    mib: int, advised: bool
) -> None:
    """100 MiB of gradients in 0.5 s; a call takes 5 ms and 2 ms per MiB, so that many small
    buckets wait for each other, one large one for the last gradient, and 25 MiB are right."""
    calls: list[Record] = []
    waits = []
    for step in range(STEPS):
        sent, end_s = 0, 0.0
        for size in (2, *[mib] * (98 // mib), 98 % mib):
            if size:
                sent += size
                begin_s = step + 0.1 + 0.5 * sent / 100
                end_s = max(begin_s, end_s) + 0.005 + 0.002 * size
                calls.append(call(len(calls) + 1, begin_s, end_s, bytes=size * MIB))
        waits.append(WaitNote(BACKWARD, step + 0.1, step + 0.601))
    profile = profiled([calls, calls], [left_running(calls) + waits] * 2)
    assert any("Try buckets of" in sentence for sentence in profile.advice) == advised
    hidden_us, exposed_us, lost_us = shares(profile, 0)
    assert lost_us == 0
    assert exposed_us == round((end_s - (STEPS - 1) - 0.601) * 1e6)
    assert hidden_us


def test_steps_are_found_without_marks_and_a_run_without_steps_is_one() -> None:
    lines = "train.py:1", "train.py:2"
    calls = [call(n + 1, n, n + 0.5, site=lines[n % 2]) for n in range(9)]
    notes: dict[tuple[str, int], list[WaitNote]] = {("", 100): []}  # of rank 0 alone
    found = build_profile([group(calls, calls)], notes)
    assert (found.steps_from, found.typical[0].step, found.typical[0].wall_s) == ("calls", 4, 2)
    assert {step.rank for step in found.steps} == {0}
    calls = [call(n + 1, n, n + 0.5, site=f"train.py:{n}") for n in range(9)]
    found = build_profile([group(calls, calls)], notes)
    assert (found.steps_from, found.typical[0].step, found.typical[0].wall_s) == ("", 1, 8.5)
    assert build_profile([], {}).typical == ()


SLEEPER = """
    import sys, time
    import torch, torch.distributed as dist, unisono
    backend, late_s, compute_s = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    dist.init_process_group(backend)
    x = torch.ones(1000)
    for _ in range(6):
        unisono.watch.step()
        dist.all_reduce(x)
        if dist.get_rank() == 1:
            time.sleep(late_s)
            work = dist.all_reduce(x, async_op=True)
        else:
            work = dist.all_reduce(x, async_op=True)
            time.sleep(compute_s)
        work.wait()
    dist.destroy_process_group()
"""


def run_profiled(program: WriteProgram, folder: Path, text: str, *args: str) -> dict[str, Any]:
    run = ("-m", "unisono", "run", "-n", "2", "--profile-file", "profile.json")
    done = program(text).run(*args, before=run)
    assert done.returncode == 0, done.stderr
    assert f"unisono: the profile is in {folder}/profile.json" in done.stderr
    assert "medians of each rank's steps" in done.stderr
    found: dict[str, Any] = json.loads((folder / "profile.json").read_text())
    return found


def test_a_program_is_profiled_as_it_is(tmp_path: Path, program: WriteProgram) -> None:
    profile = run_profiled(program, tmp_path, SLEEPER, "gloo", "0.3", "0")
    assert profile["steps_from"] == "marks"
    first, second = profile["typical"]
    assert first["step"] == second["step"] == 5
    assert first["lost_to"] == 1
    assert first["lost_s"] > first["wall_s"] / 2
    rows = {(row["is_blocking"], row["line"]): row for row in profile["calls"]}
    assert {key: row["count"] for key, row in rows.items()} == {
        (True, "program.py:9"): 1,
        (False, "program.py:12"): 0.5,
        (False, "program.py:14"): 0.5,
    }
    assert rows[False, "program.py:14"]["lost_to"] == 1
    assert "Look at rank 1: " in profile["advice"][0]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["unisono", "gloo"])
@pytest.mark.parametrize("overlap", [0.0, 0.5, 1.0])
def test_sleeps_are_found_within_a_twentieth_of_a_step(
    backend: str, overlap: float, tmp_path: Path, program: WriteProgram
) -> None:
    """Rank 1 comes 0.4 s late; meanwhile rank 0 computes for none, half or all of that."""
    profile = run_profiled(program, tmp_path, SLEEPER, backend, "0.4", str(overlap * 0.4))
    first, second = profile["typical"]
    error_s = 0.05 * first["wall_s"]
    assert first["hidden_s"] == pytest.approx(overlap * 0.4, abs=error_s)
    assert first["exposed_s"] == pytest.approx((1 - overlap) * 0.4, abs=error_s)
    assert first["lost_s"] == pytest.approx((1 - overlap) * 0.4, abs=error_s)
    assert second["exposed_s"] == pytest.approx(0, abs=error_s)


class SlowOnRank1(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        time.sleep(0.2 * dist.get_rank())
        return gradient


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("backend", ["unisono", "gloo"])
def test_ddps_wait_for_its_buckets_is_found_though_it_waits_in_cpp(
    backend: str, process_group: Any
) -> None:
    watch.start()
    try:
        group = dist.new_group(backend=backend)
        model = DistributedDataParallel(torch.nn.Linear(300, 300), process_group=group)
        with watch.profile() as profiles:
            for _ in range(4):
                SlowOnRank1.apply(model(torch.ones(1, 300))).sum().backward()  # type: ignore
        dist.barrier()
    finally:
        watch.stop()
    for profile in profiles:
        first, second = profile.typical
        assert first.lost_to == 1
        assert first.lost_s > 0.5 * first.wall_s
        assert second.exposed_s < 0.5 * second.wall_s
        (row,) = (row for row in profile.calls if row.operation == "all_reduce")
        assert "test_profiles.py:" in row.line
        assert not row.is_blocking


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel does not count")
@pytest.mark.ranks(2)
def test_time_without_a_core_is_told_apart(comm: Communicator) -> None:
    """Both ranks compute on one core, for 50 ms each."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        with watch.profile() as profiles:
            for _ in range(5):
                watch.step()
                comm.all_reduce(torch.ones(10))
                begin_s = time.thread_time()
                while time.thread_time() - begin_s < 0.05:
                    pass
            watch.step()
    finally:
        os.sched_setaffinity(0, cores)
    comm.barrier()
    for profile in profiles:
        assert sum(step.no_core_s for step in profile.typical) > 0.04
        for step in profile.typical:
            has_s = step.computation_s - step.no_core_s
            assert has_s == pytest.approx(0.05, abs=0.05 * step.wall_s)


@pytest.mark.ranks(2)
def test_of_a_long_run_the_newest_steps_are_profiled(comm: Communicator) -> None:
    done: torch.futures.Future[int] = torch.futures.Future()
    done.set_result(1)
    with watch.profile() as profiles:
        for _ in range(1500):
            watch.step()
            comm.all_reduce(torch.ones(10), async_op=True).wait()
            for _ in range(50):
                done.wait()
        watch.step()
    notes, gone = notes_of(os.getpid()) or ([], 0)
    assert (len(notes), gone > 0) == (1 << 16, True)
    comm.barrier()
    for profile in profiles:
        assert profile.left_out > 2 * (1500 * 53 - (1 << 16))
        assert "which newer ones have overwritten" in str(profile)
        for step in profile.typical:
            assert 1200 < step.step <= (1 << 16) // 53
        (row,) = profile.calls
        assert row.count == pytest.approx(1, abs=0.001)


@pytest.mark.ranks(2)
def test_a_block_is_profiled_and_nothing_stays_replaced(
    comm: Communicator, shared_tmp_path: Path
) -> None:
    before = [kind.wait for kind in (*works, torch.futures.Future, torch.distributed.Work)]
    file = shared_tmp_path / "profile.html"
    plain = Communicator.all_reduce
    with watch.profile():
        unisono.watch.step()
        comm.barrier()
    with watch.profile(file) as profiles:  # the marks of the first are not its own
        for _ in range(5):
            unisono.watch.step()
            comm.all_reduce(torch.ones(10))
            comm.all_reduce(torch.ones(20), async_op=True).wait()
    assert [kind.wait for kind in (*works, torch.futures.Future, torch.distributed.Work)] == before
    assert Communicator.all_reduce is plain
    comm.barrier()
    assert len(profiles) == (comm.rank == 0)
    for profile in profiles:
        assert [3 <= step.step <= 4 for step in profile.typical] == [True, True]
        kinds = {row.bytes: row.is_blocking for row in profile.calls if row.operation != "barrier"}
        assert kinds == {40: True, 80: False}
        page = file.read_text()
        assert "A step of median length" in page
        assert "rank 1" in page
        assert "<svg" in page


@pytest.mark.parametrize("first", ["profile", "sanitizer"])
@pytest.mark.ranks(2)
@pytest.mark.provokes
def test_profile_and_sanitizer_end_in_any_order(process_group: Any, first: str) -> None:
    group: Any = dist.group.WORLD
    comm = group.comm
    owners: Sequence[Any] = (Communicator, type(group), *works, torch.Future, dist.Work, dist.Store)  # type: ignore[attr-defined]
    owners = (*owners, torch.nn.Module, torch.optim.Optimizer, DistributedSampler)
    unisono.watch.start()
    dist.new_group([0, 1])  # from now on each class of groups is followed
    before = [dict(vars(owner)) for owner in owners]
    with contextlib.ExitStack() as profile:
        store = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
        part = dist.PrefixStore(f"sanitizer of {first}", store)  # type: ignore[attr-defined]
        sanitizer = watch.sanitized(part, comm.rank, comm.size)
        if first == "profile":
            profile.enter_context(watch.profile())
        proofs = sanitizer.__enter__()
        if first == "sanitizer":
            profiles = profile.enter_context(watch.profile())
            sanitizer.__exit__(None, None, None)
            for _ in range(5):
                unisono.watch.step()
                comm.all_reduce(torch.ones(10))
        else:
            tensor = torch.ones(10)
            work: Any = dist.all_reduce(tensor, async_op=True)
            profile.close()
            work.wait()
            tensor += 1  # no race
            work = dist.all_reduce(tensor, async_op=True)
            tensor += 1
            work.wait()
            sanitizer.__exit__(None, None, None)
            assert len(proofs) == 1, proofs
    if first == "sanitizer":
        comm.barrier()
        assert [row.count for profile in profiles for row in profile.calls] == [1] * (not comm.rank)
    for owner, methods in zip(owners, before, strict=True):
        assert dict(vars(owner)) == methods, owner
    unisono.watch.stop()


@pytest.mark.ranks(2)
def test_a_profile_goes_on_when_an_earlier_one_ends(comm: Communicator) -> None:
    plain = Communicator.all_reduce
    earlier = watch.profile()
    earlier.__enter__()
    with watch.profile() as profiles:
        earlier.__exit__(None, None, None)
        for _ in range(5):
            unisono.watch.step()
            comm.all_reduce(torch.ones(10), async_op=True).wait()
            assert Communicator.all_reduce is not plain
    assert Communicator.all_reduce is plain
    comm.barrier()
    for profile in profiles:
        assert [3 <= step.step <= 4 for step in profile.typical] == [True, True]


def test_a_forked_child_adds_nothing_to_its_parents_notes(program: WriteProgram) -> None:
    script = program("""
        import os, torch, unisono
        from unisono.watch.waits import notes_of
        unisono.init()
        with unisono.watch.profile():
            done = torch.futures.Future()
            done.set_result(1)
            done.wait()
            before = len(notes_of(os.getpid())[0])
            if (child := os.fork()) == 0:
                done.wait()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            print(before, len(notes_of(os.getpid())[0]))
    """)
    done = script.run(before=("-m", "unisono", "run", "-n", "1", "--no-prefix"))
    assert done.stdout == "1 1\n", done.stderr
