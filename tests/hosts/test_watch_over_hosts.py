"""The watch of a job over hosts: one verdict for all of it, and what each rank keeps of it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from host_jobs import Places, await_all, moment, places, set_moment, world
from namespaces import HostProcess, MakeNetwork, Network, start_ranks, start_torchrun

from faults.corpus import corpus, right
from faults.runner import Outcome
from ranks import RankPool, attempt
from unisono import watch
from unisono.comm.communicator import Communicator
from unisono.comm.shared_memory.record_reader import segments_of
from unisono.errors import GroupError
from unisono.watch import top
from unisono.watch.report import Report, from_text
from user_programs import WriteProgram, eventually, plain_environment


class Verdicts(logging.Handler):
    """What the watch says on this rank; the first report anywhere is recorded."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        set_moment(self._path, "said")


def hang(rank: int, size: int, path: str, where: Places, how: str) -> list[str]:
    """All wait until some rank has reported why, then continue; returns what the watch said
    here."""
    told = Verdicts(path)
    logging.getLogger("unisono").addHandler(told)
    with world(rank, where, timeout_s=40.0) as comm:
        pairs = comm.split([1, 2], "pairs") if rank in (1, 2) else None
        dist.barrier()
        await_all(path, rank, size)
        watch.start(hang_s=2.0)  # all are here: no other rank will be late
        HANGS[how](rank, path, comm, pairs)
        watch.stop()
        dist.barrier()
    return told.texts


def never_come(rank: int, path: str, comm: Communicator, pairs: Communicator | None) -> None:
    if rank == 3:
        moment(path, "said")
    dist.all_reduce(torch.ones(3))


def be_stopped(rank: int, path: str, comm: Communicator, pairs: Communicator | None) -> None:
    if rank == 3:
        parent = os.getpid()
        if os.fork() == 0:
            moment(path, "said")
            os.kill(parent, signal.SIGCONT)
            os._exit(0)
        os.kill(parent, signal.SIGSTOP)
    dist.all_reduce(torch.ones(3))


def send_to_nobody(rank: int, path: str, comm: Communicator, pairs: Communicator | None) -> None:
    if rank == 0:
        comm.send(torch.ones(3), 2, tag=7)
        return
    moment(path, "said")
    if rank == 2:
        comm.recv(torch.empty(3), 0, tag=7)


HANGS: dict[str, Any] = {
    "never_come": never_come,
    "be_stopped": be_stopped,
    "send_to_nobody": send_to_nobody,
}
VERDICTS = {
    "never_come": r"rank 3 on host1 never reached all_reduce #2 of group world "
    r"\(\S*test_watch_over_hosts.py:\d+\): it is in \S+:\d+, in ",
    "be_stopped": r"rank 3 on host1 never reached all_reduce #2 of group world "
    r"\(\S*test_watch_over_hosts.py:\d+\): it is stopped after barrier #1",
    "send_to_nobody": r"rank 2 on host1 never posted the match for rank 0's send to rank 2 "
    r"\(tag 7\) of group world \(\S*test_watch_over_hosts.py:\d+\): it is in ",
}


@pytest.mark.parametrize("how", HANGS)
def test_one_verdict_for_all_hosts(
    fresh_pool: RankPool, make_network: MakeNetwork, how: str
) -> None:
    with make_network(2) as made:
        where = places(made, (0, 0, 1, 1))
        told = fresh_pool.run(hang, 4, where, how, connected=False)
    texts = [text for of_rank in told for text in of_rank]
    assert len(told[0]) == len(texts) == 1, told
    assert re.match(f"unisono.watch: {VERDICTS[how]}", texts[0]), texts[0]


# -- other backends ------------------------------------------------------------------------------

ON_GLOO = """
    import sys, time
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    odd = dist.new_group([1, 3], group_desc="odd")
    rank = dist.get_rank()
    dist.barrier()
    if sys.argv[1] == "late" and rank == 3:
        time.sleep(8)
    if rank in (1, 3):
        dist.all_reduce(torch.ones(4), group=odd)
    differs = sys.argv[1] == "differs" and rank == 3
    dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX if differs else dist.ReduceOp.SUM)
    if sys.argv[1] == "differs":
        time.sleep(12)
    dist.barrier()
    dist.destroy_process_group()
    """
OF_GLOO = {
    "late": r"rank 1 \(global 3\) on host1 never reached all_reduce #1 of group odd "
    r"\(program.py:11\): it is in program.py:9, in time.sleep",
    "differs": r"rank 3 called all_reduce of float32, 4 elements, max at program.py:13 where the "
    r"others called all_reduce of float32, 4 elements, sum: call #2 of group world",
}

SLOW_START = re.compile("reached (init_process_group|new_group|barrier)|continued after")
"""What the watch may say besides, rightly, where a busy machine takes seconds to start ranks."""


@pytest.mark.parametrize("how", OF_GLOO)
def test_gloo_under_torchrun_has_one_verdict(
    two_hosts: Network, program: WriteProgram, tmp_path: Path, how: str
) -> None:
    environment = plain_environment() | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "UNISONO_WATCH": "1",
        "UNISONO_WATCH_HANG_S": "2",
    }
    command = [str(program(ON_GLOO).path), how]
    nodes = start_torchrun(two_hosts.hosts, (2, 2), command, tmp_path, environment)
    for node in nodes:
        assert node.wait() == 0, node.text()
    said = [
        line.partition("unisono.watch: ")[2]
        for node in nodes
        for line in node.text().splitlines()
        if "unisono.watch: " in line and not SLOW_START.search(line)
    ]
    assert len(said) == 1, said
    assert re.match(OF_GLOO[how], said[0]), said


PROGRAMS = {
    "exception_on_one_rank": "four_hosts",  # a rank that leaves says why
    "helper_called_twice": "four_hosts",  # ... and what it called
    "op_mismatch": "four_hosts",  # the job ends before the next periodic comparison
    "killed": "four_hosts",  # what the others finished shows how far it had come
    "padded_to_another_length": "hosts",  # gloo aborts the rank that is not at fault
    "new_group_of_other_members": "hosts",
    "all_to_all_splits": "hosts",
}


@pytest.mark.usefixtures("make_network")  # or skips
@pytest.mark.parametrize("name", PROGRAMS)
def test_verdicts_on_ranks_that_leave(name: str) -> None:
    (fault,) = (fault for fault in corpus() if fault.name == name)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-m", "faults", "--json", "--setup", PROGRAMS[name], name]
    result = json.loads(subprocess.check_output(command, env=environment))
    assert right(fault, Outcome(tuple(result["said"]), result["ended"])), result["said"]
    if name == "all_to_all_splits":
        assert "rank 1 differs from the others" in "".join(result["said"])


LOST = """
    import os, signal, sys, time
    import torch, torch.distributed as dist
    from unisono.watch.job_view import open_links
    how, rank = sys.argv[1], int(os.environ["RANK"])
    for world in range(2 if how == "remade" else 1):
        store = dist.TCPStore(os.environ["MASTER_ADDR"], 29400 + world, 2, rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        dist.barrier()
        if world == 1:
            break
        for number in range(3):
            dist.recv(torch.ones(3), 0) if rank else dist.send(torch.ones(3), 1)
        time.sleep(1.5)
        if how == "remade":
            dist.destroy_process_group()
    if how == "async" and rank == 0:
        work = dist.all_reduce(torch.ones(3), async_op=True)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP if how == "stopped" else signal.SIGKILL)
    try:
        while open_links()[0].may_answer(1) and how != "stopped":
            time.sleep(0.05)
        time.sleep(2)
        dist.recv(torch.ones(3), 1) if how == "stopped" else dist.all_reduce(torch.ones(3))
    except RuntimeError as error:
        print("unisono.watch:", str(error.report).splitlines()[0])
    """
RECEIVED = r"after recv from rank 0 \(tag 0\) \(program.py:13\)"
SEEN = {
    "killed": r"all_reduce #2 of group world \(program.py:25\): it has ended; "
    rf"last seen [2-5] s ago, {RECEIVED}",
    "stopped": r"rank 0's recv from rank 1 \(tag 0\) of group world \(program.py:25\): "
    rf"it is on host1, which is silent; last seen \d+ s ago, {RECEIVED}",
    "remade": r"all_reduce #2 of group world \(program.py:25\): it has ended; "
    r"it had reached barrier #1 \(program.py:9 on rank 0\)",
    "async": r"all_reduce #3 of group world \(program.py:25\): it has ended; "
    rf"last seen [2-5] s ago, {RECEIVED}",
}


@pytest.mark.parametrize("how", SEEN)
def test_a_rank_that_is_alone_on_its_host_and_says_nothing_more(
    two_hosts: Network, program: WriteProgram, tmp_path: Path, how: str
) -> None:
    environment = plain_environment() | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "UNISONO_WATCH": "1",
        "UNISONO_WATCH_HANG_S": "2",
    }
    command = [sys.executable, str(program(LOST).path), how]
    ranks = start_ranks(two_hosts.hosts, (0, 1), command, tmp_path, environment)
    try:
        said = eventually_said(ranks[0], "unisono.watch: ")
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
            rank.process.kill()  # it stops with its child
            rank.wait()
    assert re.match(f"rank 1 on host1 never finished {SEEN[how]}", said), ranks[0].text()


def eventually_said(rank: HostProcess, mark: str) -> str:
    """The first line with this mark, from there on."""
    assert eventually(lambda: mark in rank.text() or rank.process.poll() is not None, 60)
    return rank.text().partition(mark)[2].partition("\n")[0]


LEAVING = """
    import sys, time
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    groups = [dist.new_group([0, 1, 2, 3]) for _ in range(20)]
    for group in groups * 10:
        dist.all_reduce(torch.ones(3), group=group)
    dist.barrier()
    if dist.get_rank():
        time.sleep(float(sys.argv[1]))
    since = time.monotonic()
    dist.destroy_process_group()
    print("left in", time.monotonic() - since)
    """


@pytest.mark.parametrize("pause_s", [0, 3])
def test_a_rank_that_leaves_does_not_wait(
    two_hosts: Network, program: WriteProgram, tmp_path: Path, pause_s: int
) -> None:
    environment = plain_environment() | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "UNISONO_WATCH": "1",
    }
    command = [sys.executable, str(program(LEAVING).path), str(pause_s)]
    ranks = start_ranks(two_hosts.hosts, (0, 0, 1, 1), command, tmp_path, environment)
    for rank in ranks:
        assert rank.wait() == 0, rank.text()
        assert "unisono.watch: " not in rank.text()
        assert float(rank.text().rpartition("left in ")[2].split()[0]) < 4.0, rank.text()


INTERRUPTED = """
    import os, time
    import torch, torch.distributed as dist
    from unisono import watch
    from unisono.comm.hosts import questions
    from unisono.watch.job_view import open_links
    watch.start()

    def interrupt():
        raise KeyboardInterrupt

    dist.init_process_group("unisono")
    dist.barrier()
    if dist.get_rank() == 1:
        questions.last_words[:] = [interrupt]
    else:
        (links,) = open_links()
        while links.may_answer(1):
            time.sleep(0.05)
        print("loss:", links.loss_of(1))
    """


def test_a_process_leaves_cleanly_after_a_second_interrupt(
    two_hosts: Network, program: WriteProgram, tmp_path: Path
) -> None:
    """The watch looks once more at exit, and Ctrl-C interrupts that."""
    command = [sys.executable, str(program(INTERRUPTED).path)]
    ranks = start_ranks(two_hosts.hosts, (0, 1), command, tmp_path, plain_environment())
    for rank in ranks:
        assert rank.wait() == 0, rank.text()
    assert "loss: None" in ranks[0].text()
    assert "KeyboardInterrupt" in ranks[1].text()


# -- what exceptions carry -----------------------------------------------------------------------


def fail(rank: int, size: int, path: str, where: Places, how: str) -> tuple[str, str]:
    """The type of the exception that ended the call, and its report."""
    watch.start()
    with world(rank, where, timeout_s=40.0) as comm:
        pair = comm.split([1, 2], "pair") if rank in (1, 2) else comm
        assert pair is not None
        comm.barrier()
        await_all(path, rank, size)
        if how == "cycle":
            comm.timeout_s = pair.timeout_s = 3.0
        if how == "killed" and rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "cut" and rank == 3:
            where.host(rank).cut()
        used = pair if how == "cycle" and rank == 1 else comm

        def call() -> None:
            while True:
                if how == "mismatch" and rank == 3:
                    used.broadcast(torch.ones(3))
                used.all_reduce(torch.ones(3))

        error = attempt(call)
    watch.stop()
    assert isinstance(error, GroupError), error
    assert error.report is not None, error
    return type(error).__name__, error.report.to_text()


def reports_of(
    fresh_pool: RankPool, make_network: MakeNetwork, how: str
) -> dict[int, tuple[str, Report]]:
    with make_network(2) as made:
        where = places(made, (0, 0, 1, 1))
        outcomes = fresh_pool.outcomes(fail, 4, where, how, connected=False)
    for outcome in outcomes:
        assert outcome.error is None or outcome.exit_code == -signal.SIGKILL, outcome.error
    return {
        rank: (outcome.value[0], from_text(outcome.value[1]))
        for rank, outcome in enumerate(outcomes)
        if outcome.value is not None
    }


def test_a_killed_rank(fresh_pool: RankPool, make_network: MakeNetwork) -> None:
    found = reports_of(fresh_pool, make_network, "killed")
    assert sorted(found) == [0, 1, 2]
    for kind, report in found.values():
        assert (kind, report.kind, report.culprits) == ("PeerLost", "lost", (3,)), report
        assert "rank 3 on host1 never reached all_reduce #2" in report.verdict
        assert [rank.host for rank in report.ranks] == ["host0", "host0", "host1", "host1"]
        assert report.ranks[3].last.startswith("barrier #1"), report.ranks[3]


def test_a_mismatch(fresh_pool: RankPool, make_network: MakeNetwork) -> None:
    found = reports_of(fresh_pool, make_network, "mismatch")
    assert len(found) == 4
    for kind, report in found.values():
        assert (kind, report.kind) == ("CollectiveMismatch", "mismatch")
        assert report.culprits == (3,)
        assert report.site.partition(":")[0].endswith("test_watch_over_hosts.py"), report.site
        assert [rank.host for rank in report.ranks] == ["host0", "host0", "host1", "host1"]


def test_calls_of_groups_over_hosts_that_cross(
    fresh_pool: RankPool, make_network: MakeNetwork
) -> None:
    found = reports_of(fresh_pool, make_network, "cycle")
    cycles = [report for _, report in found.values() if report.kind == "cycle"]
    assert cycles
    for report in cycles:
        assert report.culprits == (1, 2)
        assert "rank 1 on host0 is in all_reduce #1 of group world.pair" in report.verdict
        assert "rank 2 on host1 is in all_reduce #2 of group world" in report.verdict


def test_each_host_speaks_where_the_network_is_cut(
    fresh_pool: RankPool, make_network: MakeNetwork
) -> None:
    found = reports_of(fresh_pool, make_network, "cut")
    assert len(found) == 4
    for rank, (kind, report) in found.items():
        other = "host1" if rank < 2 else "host0"
        assert kind == "PeerLost"
        assert other in report.verdict
        assert report.kind == "lost"


# -- traces --------------------------------------------------------------------------------------

AHEAD_S = 5000.0
TRACED = """
import os, sys, time
import torch, torch.distributed as dist
from unisono import watch

with watch.trace(sys.argv[1]):
    dist.init_process_group("unisono")
    for step in range(20):
        dist.all_reduce(torch.ones(1000))
        if dist.get_rank() == 0:
            dist.send(torch.ones(5), 3)
        elif dist.get_rank() == 3:
            dist.recv(torch.ones(5), 0)
    dist.barrier()
    print("clock", time.monotonic())
watch.stop()
dist.destroy_process_group()
"""


def test_a_trace_of_all_hosts_is_on_one_clock(make_network: MakeNetwork, tmp_path: Path) -> None:
    """The clock of host1 is far ahead, like that of a machine that was started long before."""
    program = tmp_path / "traced.py"
    program.write_text(TRACED)
    path = tmp_path / "trace.json"
    python = f"{sys.executable} {program} {path}"
    ahead = f"unshare --time --monotonic={AHEAD_S:.0f} --fork --kill-child {python}"
    script = f"[ $(hostname) = host1 ] && exec {ahead} || exec {python}"
    with make_network(2) as made:
        ranks = start_ranks(made.hosts, (0, 0, 1, 1), ["sh", "-c", script], tmp_path, os.environ)
        for rank in ranks:
            assert rank.wait() == 0, rank.text()
        clocks = [float(re.findall(r"clock (\S+)", rank.text())[0]) for rank in ranks]
    assert min(clocks[2:]) - max(clocks[:2]) > AHEAD_S - 60, clocks
    trace = json.loads(path.read_text())
    told = trace["otherData"]["clocks_of_hosts"]["host1"]
    error_us = told["error_us"]
    assert abs(told["ahead_us"] - AHEAD_S * 1e6) <= error_us + 1
    assert error_us < 500_000  # of the quickest of many answers, on a busy machine, too
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    titles = {
        event["pid"]: event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "process_name"
    }
    assert [re.sub(r"pid \d+", "pid", titles[rank]) for rank in range(4)] == [
        "rank 0 (pid on host0)",
        "rank 1 (pid on host0)",
        "rank 2 (pid on host1)",
        "rank 3 (pid on host1)",
    ]
    calls: dict[int, list[Any]] = {}
    for event in events:
        if event["args"]["call"]:
            calls.setdefault(event["args"]["call"], []).append(event)
    assert len(calls) == 21
    for alike in calls.values():  # no rank has left a call before the last one reached it
        assert sorted(event["pid"] for event in alike) == [0, 1, 2, 3]
        came = max(event["ts"] for event in alike)
        left = min(event["ts"] + event["dur"] for event in alike)
        assert left > came - error_us
    sends = [event for event in events if event["name"] == "send"]
    receives = [event for event in events if event["name"] == "recv"]
    assert len(sends) == len(receives) == 20
    for send, receive in zip(sends, receives, strict=True):
        assert receive["ts"] + receive["dur"] > send["ts"] - error_us


# -- top -----------------------------------------------------------------------------------------


def look_at_top(rank: int, size: int, path: str, where: Places) -> list[tuple[int, str]]:
    with world(rank, where) as comm, contextlib.ExitStack() as looking:
        pids = torch.zeros(size, dtype=torch.int64)
        comm.all_gather(pids, torch.tensor([os.getpid()]))
        for pid in pids if rank == 3 else []:  # as one who reads the other host's records
            for path in segments_of(int(pid)):
                looking.enter_context(open(path, "rb"))
        comm.barrier()
        (job,) = top.jobs(os.getpid())
        comm.barrier()
        return [(row.rank, row.host) for row in job.rows if row.group == comm.name]


def test_top_shows_hosts(fresh_pool: RankPool, make_network: MakeNetwork) -> None:
    with make_network(2) as made:
        where = places(made, (0, 1, 0, 1))
        found = fresh_pool.run(look_at_top, 4, where, connected=False)
    for rows in found:  # of all hosts: they share one PID namespace
        assert rows == [(0, "host0"), (1, "host1"), (2, "host0"), (3, "host1")]
