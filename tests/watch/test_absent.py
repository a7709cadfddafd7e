"""Ranks that do not come when a group is made: real ranks, one of which comes late."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from unisono import watch
from unisono.watch.absent import Makings, OverdueMaking
from unisono.watch.report import Report
from user_programs import eventually, plain_environment, write_program

# The ranks that the second argument names wait until all of them have loaded torch, which takes
# seconds: before that they would be late, too.
LATE = """
    import os, sys, time
    from pathlib import Path
    import torch
    import torch.distributed as dist

    def come_late(call, waiting):
        named = f"rank {RANK} never reached {call}"
        while sum(named in file.read_text() for file in Path("reports").iterdir()) < waiting:
            time.sleep(0.05)

    RANK, BACKEND = int(os.environ["RANK"]), sys.argv[1]
    loaded = [Path(__file__).with_name(f"loaded-{rank}") for rank in sys.argv[2]]
    Path(__file__).with_name(f"loaded-{RANK}").touch()
    while not all(file.exists() for file in loaded):
        time.sleep(0.02)
"""
OF_WORLD = """
    if RANK == 1:
        come_late("init_process_group", waiting=2)
    dist.init_process_group(BACKEND)
    dist.barrier()
"""
OF_MEMBERS = """
    if RANK == 2:
        come_late("new_group", waiting=1)
    if RANK:
        pair = dist.new_group([1, 2], use_local_synchronization=True)
        dist.barrier(pair)
"""
OF_SPLIT_AND_JOIN = """
    import unisono
    Path(__file__).with_name(f"made-{RANK}").touch()
    while not all(Path(__file__).with_name(f"made-{rank}").exists() for rank in range(3)):
        time.sleep(0.02)
    comm = unisono.init()
    if RANK == 1:
        come_late("split", waiting=1)
    comm.split([0, 1])
    if RANK:
        while not list(Path("reports").glob("seen-elsewhere*")):
            time.sleep(0.05)
    unisono.Communicator.join(f"late-{os.getppid()}", RANK, 3).barrier()
"""
END = """
    dist.destroy_process_group()
"""


def test_a_call_is_news_once_and_until_it_returns() -> None:
    """While all ranks are asked, the last one may come: where it is then explains nothing."""
    of_torch: dict[str, Any] = {}
    source = "def init_process_group(event): event.wait()"
    exec(compile(source, "torch/distributed/distributed_c10d.py", "exec"), of_torch)
    come, makings = threading.Event(), Makings()
    found: list[OverdueMaking] = []

    def is_found() -> bool:
        found.extend(makings.overdue(0))
        return bool(found)

    thread = threading.Thread(target=of_torch["init_process_group"], args=(come,))
    thread.start()
    assert eventually(is_found)
    late, ended = (report_on(1, kind) for kind in ("hang", "lost"))
    assert makings.is_news(found[0], late)
    assert not makings.is_news(found[0], late)  # again
    assert makings.is_news(found[0], ended)
    come.set()
    thread.join()
    assert not makings.is_news(found[0], report_on(2, "hang"))


def report_on(rank: int, kind: str) -> Report:
    return Report(kind, f"rank {rank} does not come", "world", "gloo", culprits=(rank,))


@pytest.mark.parametrize("backend", ["unisono", "gloo"])
def test_who_does_not_come(backend: str, tmp_path: Path) -> None:
    """To the world, to a group of some, to a split, and to a group that has no parent."""
    own = OF_SPLIT_AND_JOIN if backend == "unisono" else ""
    late = write_program(tmp_path, LATE + OF_WORLD + OF_MEMBERS + own + END)
    (tmp_path / "reports").mkdir()
    settings = {"UNISONO_WATCH_HANG_S": "1", "UNISONO_WATCH_FOLDER": str(tmp_path / "reports")}
    run = ("-m", "unisono", "run", "--watch", "-n", "3")
    done = late.run(backend, "012", before=run, environment=settings)
    assert done.returncode == 0, done.stderr
    reports = [watch.load(path) for path in (tmp_path / "reports").iterdir()]
    line = late.path.read_text().splitlines().index("        time.sleep(0.05)") + 1
    lines = {f"program.py:{line - 1}", f"program.py:{line}"}  # of the loop that waits
    group = "([1, 2])" if backend == "unisono" else ""
    calls = {"init_process_group": (1, ""), "new_group": (2, group)}
    if own:
        calls["split"] = 1, "([0, 1]) of group world"
    for call, (rank, of) in calls.items():
        verdict = rf"rank {rank} never reached {call}{of} (program.py:"
        assert done.stderr.count(verdict) == 1, done.stderr
        about = call, (rank,)  # other ranks may have been late, too
        found = [report for report in reports if (report.operation, report.culprits) == about]
        assert {report.kind for report in found} == {"hang"}, reports
        assert {report.site for report in found} <= lines, found
        if call == "split":
            assert {report.backend for report in found} == {"unisono"}
    joins = (
        r"Communicator.join\('late-\d+', rank=0, size=3\) \(program.py:\d+\) waits for processes"
    )
    assert bool(re.search(joins, done.stderr)) == bool(own), done.stderr


@pytest.mark.parametrize("sleeps_s", [0, pytest.param(4, marks=pytest.mark.slow)])
def test_a_rank_that_has_ended_does_not_come(tmp_path: Path, sleeps_s: int) -> None:
    """All ranks were started here: the job ends, even if that rank was reported as late before."""
    world = OF_WORLD.replace(
        'come_late("init_process_group", waiting=2)',
        f"__import__('time').sleep({sleeps_s}), __import__('os')._exit(0)",
    )
    run = ("-m", "unisono", "run", "--watch", "--watch-grace", "0", "-n", "3")
    settings = {"UNISONO_WATCH_HANG_S": "1"}
    done = write_program(tmp_path, LATE + world).run("gloo", "02", before=run, environment=settings)
    assert done.returncode == 1, done.stderr
    lost = r"rank 1 never reached init_process_group \(program.py:\d+\): it has ended"
    assert re.search(rf"unisono run: {lost}; ended 0 s after the watch's report", done.stderr)
    assert "another launcher" not in done.stderr


def test_ranks_of_other_machines_do_not_come(tmp_path: Path) -> None:
    (tmp_path / "reports").mkdir()
    store = 'init_process_group(BACKEND, "file://{}", rank=RANK, world_size=4)'
    world = OF_WORLD.replace("RANK == 1", "False")
    world = world.replace("init_process_group(BACKEND)", store.format(tmp_path / "store"))
    program = write_program(tmp_path, LATE + world)
    settings = {
        "UNISONO_WATCH": "1",
        "UNISONO_WATCH_HANG_S": "1",
        "UNISONO_WATCH_FOLDER": str(tmp_path / "reports"),
        "WORLD_SIZE": "4",
    }
    for rank in range(2):
        program.start("gloo", "01", environment=settings | {"RANK": str(rank)})
    try:
        end = time.monotonic() + 60
        while not (found := list((tmp_path / "reports").glob("seen-elsewhere*.json"))):
            assert time.monotonic() < end
            time.sleep(0.1)
    finally:
        program.end()
    verdict = watch.load(found[0]).verdict
    assert verdict.startswith("ranks 0 and 1 reached init_process_group (program.py:"), verdict
    assert "of 2 ranks that another launcher or machine started, some have not" in verdict


@pytest.mark.slow
def test_a_pipeline_whose_processes_all_have_the_variables_of_a_rank(tmp_path: Path) -> None:
    """`export RANK=0; python train.py | tee log`: `tee` is not rank 0."""
    (tmp_path / "reports").mkdir()
    program = write_program(tmp_path, LATE + OF_WORLD.replace("RANK == 1", "False"))
    settings = {
        "UNISONO_WATCH": "1",
        "UNISONO_WATCH_HANG_S": "1",
        "UNISONO_WATCH_FOLDER": str(tmp_path / "reports"),
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    (tmp_path / "log").touch()
    command = f"{sys.executable} {program.path} gloo 0 2>&1 | tee {tmp_path / 'log'}"
    pipeline = subprocess.Popen(
        ["sh", "-c", command],
        env=plain_environment() | settings,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        assert eventually(lambda: "unisono.watch: " in (tmp_path / "log").read_text(), 60)
    finally:
        os.killpg(pipeline.pid, signal.SIGKILL)
        pipeline.wait()
    reports = [watch.load(path) for path in (tmp_path / "reports").iterdir()]
    assert [report.kind for report in reports] == ["elsewhere"], reports


def test_a_program_with_a_file_of_the_same_name() -> None:
    made: dict[str, Any] = {}
    source = "def new_group(begun, end): begun.set(); end.wait()"
    exec(compile(source, "hello_world/world.py", "exec"), made)
    begun, end, makings = threading.Event(), threading.Event(), Makings()
    thread = threading.Thread(target=made["new_group"], args=(begun, end))
    thread.start()
    try:
        assert begun.wait(60)
        assert not makings.overdue(0)
        assert not makings.overdue(0)
    finally:
        end.set()
        thread.join()


def test_ranks_that_a_program_has_numbered_itself_are_unknown() -> None:
    """As in processes that a rank has spawned: they started with its variables."""
    program = """if True:
        import os
        from unisono.watch.absent import _launched_together
        print(_launched_together() == {0: os.getpid()})
        os.environ["RANK"] = "1"
        print(_launched_together() == {})
    """
    command = [sys.executable, "-c", program]
    printed = subprocess.check_output(command, env=plain_environment() | {"RANK": "0"}, text=True)
    assert printed.split() == ["True", "True"]
