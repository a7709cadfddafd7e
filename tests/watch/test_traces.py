"""Traces: no call is missing, even if ranks close, exit or die meanwhile."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy
import pytest

from unisono import watch
from unisono.comm.communicator import Communicator
from unisono.comm.shared_memory import record_reader
from unisono.comm.shared_memory.memory_transport import SharedMemory
from unisono.comm.shared_memory.record_reader import RecordFollower
from user_programs import WriteProgram, eventually

RUN = ("-m", "unisono", "run", "-n", "2", "--trace", "trace.json")


def events(path: Path) -> list[dict[str, Any]]:
    trace = json.loads(path.read_text())
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def test_groups_that_are_closed_and_processes_that_end_at_once_are_in_the_trace(
    tmp_path: Path,
    program: WriteProgram,
) -> None:
    script = program("""
        import os, sys
        import numpy, unisono
        comm = unisono.init()
        for _ in range(3):
            pair = comm.split([0, 1], "pair")
            for _ in range(5):
                pair.all_reduce(numpy.ones(4))
            pair.close()
        for _ in range(10):
            comm.all_reduce(numpy.ones(4))
        if comm.rank == 1:
            os._exit(0)
    """)
    done = script.run(before=RUN)
    assert done.returncode == 0, done.stderr
    found = events(tmp_path / "trace.json")
    assert Counter(event["pid"] for event in found) == {0: 25, 1: 25}
    assert {event["args"]["site"].partition(" in ")[0] for event in found} == {
        "program.py:8",
        "program.py:11",
    }
    assert {event["args"]["state"] for event in found} == {"finished"}


def test_steps_arrows_and_counters(tmp_path: Path, program: WriteProgram) -> None:
    """Rank 1 arrives last in every call, by more than the first call of a step takes."""
    done = program("""
        import time
        import numpy, unisono
        comm = unisono.init()
        for _ in range(3):
            unisono.watch.step()
            if comm.rank == 1:
                time.sleep(0.05)
            comm.all_reduce(numpy.ones(4))
    """).run(before=RUN)
    assert done.returncode == 0, done.stderr
    trace = json.loads((tmp_path / "trace.json").read_text())
    found = [event for event in trace["traceEvents"] if event["ph"] != "M"]
    steps = [event for event in found if event.get("cat") == "step"]
    assert Counter((e["pid"], e["name"]) for e in steps) == {
        (rank, f"step {number}"): 1 for rank in (0, 1) for number in (1, 2, 3)
    }
    flows = [event for event in found if event.get("cat") == "flow"]
    assert Counter((e["pid"], e["ph"]) for e in flows) == {(1, "s"): 3, (0, "f"): 3}
    calls = [event for event in found if event["name"] == "all_reduce"]
    for end in (event for event in flows if event["ph"] == "f"):  # it falls into a call
        assert any(e["ts"] <= end["ts"] <= e["ts"] + e["dur"] for e in calls if e["pid"] == 0)
    counts = [e["args"]["bytes"] for e in found if e["ph"] == "C" and e["pid"] == 0]
    assert counts == [32, 0] * 3


def test_a_rank_that_is_killed_leaves_its_calls_and_the_one_that_it_was_in(
    tmp_path: Path, program: WriteProgram
) -> None:
    script = program("""
        import os, signal
        import numpy, unisono
        comm = unisono.init()
        for _ in range(5):
            comm.all_reduce(numpy.ones(4))
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.all_reduce(numpy.ones(4))
    """)
    done = script.run(before=RUN)
    assert done.returncode == 137, done.stderr
    calls = Counter(
        (event["pid"], event["args"]["state"]) for event in events(tmp_path / "trace.json")
    )
    assert calls == {(0, "finished"): 5, (1, "finished"): 5, (0, "failed"): 1}


def test_an_empty_trace_is_a_file(tmp_path: Path, program: WriteProgram) -> None:
    done = program("pass").run(before=RUN)
    assert done.returncode == 0, done.stderr
    file = tmp_path / "trace.json"
    assert f"unisono: the trace is in {file}; https://ui.perfetto.dev opens it\n" in done.stderr
    assert events(tmp_path / "trace.json") == []


def test_what_a_trace_lacks_is_counted(tmp_path: Path, program: WriteProgram) -> None:
    script = program("""
        import numpy, unisono
        comm = unisono.init()
        ones = numpy.ones(1)
        for _ in range(20000):
            comm.all_reduce(ones)
    """)
    done = script.run(before=RUN)
    assert done.returncode == 0, done.stderr
    lost = json.loads((tmp_path / "trace.json").read_text())["otherData"]["dropped_calls"]
    assert len(events(tmp_path / "trace.json")) + lost == 2 * 20000
    assert (f"trace.json lacks {lost} calls" in done.stderr) == (lost > 0)


@pytest.mark.ranks(2)
def test_a_follower_reads_each_record_once_and_counts_what_it_missed(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(comm.transport, SharedMemory)
    follower = RecordFollower(comm.transport.group.state()["descriptor"])
    for _ in range(10):
        comm.barrier()
    assert [record.call for rank, record in follower.read() if rank == comm.rank] == [*range(1, 11)]
    for _ in range(3000):
        comm.barrier()
    mine = [record.call for rank, record in follower.read() if rank == comm.rank]
    assert mine == [*range(3010 - 1023, 3011)]
    assert follower.dropped()[comm.rank] == 3000 - 1024
    for _ in range(10):
        assert follower.copy()
        for _ in range(300):
            comm.barrier()
    mine = [record.call for rank, record in follower.read() if rank == comm.rank]
    assert mine == [*range(3011, 6011)]  # copied ones, too
    assert follower.complete_since_s() == 0
    monkeypatch.setattr(record_reader, "_COPIES_KEPT", 8)
    for _ in range(20):
        follower.copy()
        for _ in range(300):
            comm.barrier()
    left = [record for rank, record in follower.read() if rank == comm.rank]
    assert left[0].arrived_s <= follower.complete_since_s() < left[-1].arrived_s
    assert [record.call for record in left] == [*range(left[0].call or 0, 12011)]
    comm.barrier()
    follower.close()


@pytest.mark.ranks(2)
def test_a_group_closed_inside_a_trace_is_in_it(comm: Communicator, shared_tmp_path: Path) -> None:
    comm.barrier()
    with watch.trace(shared_tmp_path / "trace.json"):
        pair = comm.split([0, 1], "pair")
        assert pair is not None
        for _ in range(5):
            pair.all_reduce(numpy.ones(3))
        pair.close()
    comm.barrier()
    if comm.rank == 0:
        found = events(shared_tmp_path / "trace.json")
        pairs = [e for e in found if e["name"] == "all_reduce"]  # a peer may be in the next barrier
        assert Counter(e["pid"] for e in pairs) == {0: 5, 1: 5}
        assert all(Path(__file__).name in e["args"]["site"] for e in pairs)


@pytest.mark.ranks(3)
def test_a_group_of_other_ranks_closed_inside_a_trace_is_in_it(
    comm: Communicator, shared_tmp_path: Path
) -> None:
    """The rank that writes looks for the others' groups while they run."""
    comm.barrier()
    with watch.trace(shared_tmp_path / "trace.json"):
        pair = comm.split([1, 2], "pair")
        if pair is not None:
            pair.all_reduce(numpy.ones(3))
        else:
            assert watch._monitor is not None
            trace: Any = watch._monitor.tracing._trace
            assert eventually(lambda: len(trace._followers) == 2)
        comm.barrier()
        if pair is not None:
            pair.close()
        comm.barrier()
    comm.barrier()
    if comm.rank == 0:
        found = events(shared_tmp_path / "trace.json")
        assert Counter(e["pid"] for e in found if e["name"] == "all_reduce") == {1: 1, 2: 1}


def test_what_may_happen_to_a_trace_inside_a_program(tmp_path: Path, program: WriteProgram) -> None:
    """The watch stops inside the block; the disk is full; the rank that would write is killed."""
    done = program("""
        import os, resource, signal
        import numpy, unisono
        from unisono.comm.shared_memory.record_reader import read_segment
        from user_programs import eventually
        comm = unisono.init()
        with unisono.watch.trace("stopped.json"):
            comm.all_reduce(numpy.ones(4))
            unisono.watch.stop()
        assert eventually(lambda: os.path.exists("stopped.json"))
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        with unisono.watch.trace("full.json"):
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
            for _ in range(10):
                comm.all_reduce(numpy.ones(4))
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        try:
            with unisono.watch.trace("killed.json"):
                for _ in range(5):
                    comm.all_reduce(numpy.ones(4))
                if comm.rank == 0:
                    records = comm.transport.membership.group.state()["descriptor"]
                    waits = lambda rank: read_segment(records, 1).ranks[rank].records[-1].call == 17
                    assert eventually(lambda: waits(1) and waits(2))
                    os.kill(os.getpid(), signal.SIGKILL)
                comm.all_reduce(numpy.ones(4))
        except unisono.PeerLost as error:
            print(error.report.verdict, flush=True)
    """).run(
        before=("-m", "unisono", "run", "-n", "3"),
        environment={"PYTHONPATH": str(Path(__file__).parents[1])},
    )
    assert done.returncode == 137, done.stderr
    how = "rank 0 never reached all_reduce #17 of group world (program.py:26): it was killed by"
    assert done.stdout.count(f"{how} SIGKILL after all_reduce #16 (program.py:20)") == 2
    assert Counter(e["pid"] for e in events(tmp_path / "stopped.json")) == {0: 1, 1: 1, 2: 1}
    failure = f"unisono: the trace {tmp_path / 'full.json'} could not be written: File too large"
    assert done.stderr.count(failure) == 1
    assert (tmp_path / "full.json").read_text() == ""
    states = Counter((e["pid"], e["args"]["state"]) for e in events(tmp_path / "killed.json"))
    assert states == {
        **{(rank, "finished"): 5 for rank in range(3)},
        **{(rank, "failed"): 1 for rank in (1, 2)},
    }


def test_the_rank_that_wrote_a_trace_may_end_before_the_others_leave_it(
    tmp_path: Path, program: WriteProgram
) -> None:
    done = program("""
        import os
        import numpy, unisono
        from user_programs import eventually
        from unisono.processes import state_of
        comm = unisono.init()
        pids = numpy.zeros(2, dtype=numpy.int64)
        comm.all_gather(pids, numpy.array([os.getpid()]))
        with unisono.watch.trace("trace.json"):
            comm.all_reduce(numpy.ones(4))
            if comm.rank == 1:
                assert eventually(lambda: state_of(pids[0]).has_ended)
                written = os.stat("trace.json")
        if comm.rank == 1:
            assert os.stat("trace.json") == written
    """).run(
        before=("-m", "unisono", "run", "-n", "2"),
        environment={"PYTHONPATH": str(Path(__file__).parents[1])},
    )
    assert done.returncode == 0, done.stderr
    assert {event["pid"] for event in events(tmp_path / "trace.json")} == {0, 1}
