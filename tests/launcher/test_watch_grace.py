"""`unisono run --watch` ends ranks that wait for something that the watch knows cannot happen."""

from __future__ import annotations

import re
import time

import pytest
from click.testing import CliRunner

from unisono.cli import main
from user_programs import WriteProgram

SOON = {"UNISONO_WATCH_HANG_S": "1"}
MISMATCH = """
    import os, sys, time
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    dist.barrier()
    print("ready", flush=True)
    if dist.get_rank() == 2:
        dist.barrier()
    else:
        dist.all_reduce(torch.ones(4))
    time.sleep(600)  # should gloo find a way to go on
    """

DEAD_THREAD = """
    import queue, threading
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    batches = queue.Queue()
    def load():
        raise ValueError("no such sample")
    if dist.get_rank() == 1:
        threading.Thread(target=load, name="loader").start()
        batches.get()
    dist.all_reduce(torch.ones(4))
    """


@pytest.mark.slow
@pytest.mark.provokes
def test_a_rank_that_waits_for_a_dead_thread_ends_the_job(program: WriteProgram) -> None:
    done = program(DEAD_THREAD).run(
        before=("-m", "unisono", "run", "-n", "2", "--watch", "--watch-grace", "0.5"),
        environment=SOON,
    )
    assert done.returncode == 1, done.stderr
    error = done.stderr.partition("unisono run: ")[2]
    verdict, *_ = error.splitlines()
    assert verdict.startswith("rank 1 never reached all_reduce #1 of group world (program.py:11)")
    assert verdict.endswith("; ended 0.5 s after the watch's report (--watch-grace)")
    said = "thread loader raised ValueError (no such sample) at program.py:7 in load"
    assert said in error


@pytest.mark.slow
@pytest.mark.provokes
def test_a_mismatch_on_gloo_ends_the_job_with_the_report(program: WriteProgram) -> None:
    script = program(MISMATCH)
    done = script.run(
        before=("-m", "unisono", "run", "-n", "3", "--watch", "--watch-grace", "0.5"),
        environment=SOON,
    )
    assert done.returncode == 1, done.stderr
    error = done.stderr.partition("unisono run: ")[2]
    first, *rest = error.splitlines()
    assert first.endswith("; ended 0.5 s after the watch's report (--watch-grace)")
    assert "rank 2 called barrier at program.py:8 where the others called all_reduce" in first
    assert "call #2 of group world" in first
    assert re.search("ranks? .* (was|were) terminated while still running", "\n".join(rest))


@pytest.mark.provokes
@pytest.mark.slow
def test_it_goes_on_for_as_long_as_is_asked_for(program: WriteProgram) -> None:
    script = program(MISMATCH)
    process = script.start(
        before=("-m", "unisono", "run", "-n", "3", "--watch", "--watch-grace", "inf"),
        environment=SOON,
    )
    try:
        assert process.stdout is not None
        assert "ready" in process.stdout.readline()
        time.sleep(5)
        assert process.poll() is None
    finally:
        process.terminate()
        err = process.communicate(timeout=180)[1]
    assert "unisono.watch: rank 2 called barrier" in err
    assert "watch-grace" not in err


@pytest.mark.parametrize("option", ["--timeout", "--watch-grace"])
def test_a_time_must_be_a_number(option: str) -> None:
    done = CliRunner().invoke(main, ["run", option, "nan", "program.py"])
    assert done.exit_code == 2
    assert f"'{option}': 'nan' is not a time" in done.output
