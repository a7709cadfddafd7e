"""The watch: what it reports about native and watched groups, and what it leaves alone."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from made_up_records import group, record
from torch.nn.parallel import DistributedDataParallel

from faults.corpus import (
    Fault,
    corpus,
    false_in,
    names_rank_and_line,
    names_ranks,
    read,
    reports_in,
    right,
)
from faults.page import named_by_peer
from faults.runner import Outcome
from ranks import connect
from unisono import watch
from unisono.cli import main
from unisono.comm.communicator import Communicator
from unisono.comm.shared_memory import record_reader
from unisono.comm.shared_memory.error_texts import dtype_name
from unisono.comm.shared_memory.record_reader import read_process
from unisono.comm.shared_memory.records import GroupRecords, Process, RankRecords, Record
from unisono.errors import GroupAborted, UnisonoError
from unisono.watch import top
from unisono.watch.alignment import find_shift
from unisono.watch.calls import newest_calls, waits
from unisono.watch.debug import debug
from unisono.watch.differences import mismatch
from unisono.watch.hangs import hang, is_certain
from unisono.watch.report import RankReport, Report, load
from unisono.watch.stack_server import SIGNAL
from unisono.watch.stacks import callee_of, lines_of_site, short_path
from unisono.watch.summaries import summarise
from unisono.watch.whereabouts import Whereabouts
from user_programs import Program, WriteProgram, eventually

SAMPLE = (
    *("lock", "holds_the_gil", "killed", "crossed_groups", "shape_mismatch", "recv_ring"),
    *("auxiliary_loss_left_out", "new_group_by_members", "checkpoint_thread", "all_to_all_splits"),
    *("recv_from_anybody", "wrong_tag", "two_send_to_the_wrong_neighbour", "group_names_swapped"),
    *("group_closed_by_one_rank", "exception_in_a_future", "prefetch_in_a_pool", "one_step_more"),
)


# -- the corpus ----------------------------------------------------------------------------------


def run_module(name: str, *args: str) -> list[Any]:
    """What one of our modules prints, as lines of JSON. It forks, so it runs elsewhere: this
    process has threads."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    printed = subprocess.check_output([sys.executable, "-m", name, *args], env=environment)
    return [json.loads(line) for line in printed.splitlines()]


def run_corpus(*args: str) -> list[tuple[Fault, str, Outcome]]:
    """Run programs of the corpus, all from one other process: torch takes long to load."""
    faults = {fault.name: fault for fault in corpus()}
    return [
        (faults[result["name"]], result["setup"], Outcome(tuple(result["said"]), result["ended"]))
        for result in run_module("faults", "--json", *args)
    ]


def run_on_ranks(script: Program, ranks: int, setup: str) -> Outcome:
    """Run a program as the corpus is run."""
    (result,) = run_module("faults.runner", str(script.path), str(ranks), setup)
    return Outcome(tuple(result["said"]), result["ended"])


@pytest.mark.provokes
def test_the_verdict_names_the_right_rank_and_line() -> None:
    runs = run_corpus(*SAMPLE)
    assert len(runs) == sum(len(fault.setups) for fault in corpus() if fault.name in SAMPLE)
    for fault, setup, outcome in runs:
        assert right(fault, outcome), (fault.name, setup, outcome.said)


@pytest.mark.provokes
@pytest.mark.slow
@pytest.mark.parametrize("fault", corpus(), ids=lambda fault: fault.name)
def test_the_whole_corpus(fault: Fault) -> None:
    runs = run_corpus(fault.name)
    assert [setup for _, setup, _ in runs] == list(fault.setups)
    for _, setup, outcome in runs:
        reports = reports_in(outcome)
        if setup in fault.line_missed:
            assert not right(fault, outcome), "no longer missed: say so in the program"
            assert names_ranks(fault, reports[0].partition("\n")[0]), outcome.said
            assert not false_in(fault, outcome)
        else:
            assert right(fault, outcome), (setup, reports, outcome.said)


def test_a_wrong_verdict_does_not_count() -> None:
    fault = read(corpus()[0].path)
    assert not names_rank_and_line(fault, f"rank 9 never came ({fault.name}.py:{fault.line})")
    assert not names_rank_and_line(fault, f"rank {fault.culprits[0]} never came (other.py:1)")
    assert not names_rank_and_line(fault, f"rank 1 never came ({fault.name}.py:{fault.line}1)")
    assert names_ranks(replace(fault, culprits=(1, 2)), "ranks 1 and 2 never came")
    assert names_ranks(replace(fault, culprits=(0, 1, 2, 5)), "ranks 0-2 and 5 never came")
    assert not names_ranks(replace(fault, culprits=(1, 3)), "ranks 0 and 1 never came, after 3 s")
    assert len(corpus()) >= 25


def test_what_counts_of_what_others_say() -> None:
    fault = next(fault for fault in corpus() if fault.name == "early_return")  # rank 1
    shown = f'  File "early_return.py", line {fault.line}, in <module>\n    # rank 1\n'
    for said, named in (
        (("RuntimeError: Timed out", ""), "neither"),
        (("[rank1]:[E ...] [Rank 1]: Ranks 0, 2 failed", ""), "neither"),
        (("RuntimeError: [Rank 0]: Ranks 1 failed", ""), "rank"),
        (("RuntimeError: Timed out", shown), "line"),
        ((shown.replace(", in", "1, in"), "RuntimeError: Timed out"), "neither"),
        (("Rank 0 is in one call, but Rank 1 in another", shown), "rank and line"),
    ):
        assert str(named_by_peer(fault, Outcome(said, ended=True))) == named, said


AWKWARD = """
    import threading, time
    import torch, torch.distributed as dist

    rank = dist.get_rank()
    own = dist.new_group([0, 1, 2], group_desc="checkpoints")

    def save() -> None:
        for _ in range(5):
            dist.barrier(group=own)  # a thread with a group of its own
            time.sleep(0.02)

    thread = threading.Thread(target=save)
    thread.start()
    note = torch.zeros(1)
    early = dist.irecv(note, 0, tag=9) if rank else None  # and waited for at the end
    for step in range(30):
        if rank == 0 and step == 3:
            time.sleep(0.7)  # a checkpoint
        if rank == 1 and step == 0:
            time.sleep(0.7)  # a compilation
        if rank == 0:
            dist.broadcast(torch.ones(2), 0)  # a line of its own for the same call
        else:
            dist.broadcast(torch.zeros(2), 0)
        dist.all_reduce(torch.ones(4))
        rows = [step % 3 + 1] * 3  # parts of other sizes in every step
        dist.all_to_all_single(torch.zeros(sum(rows)), torch.ones(sum(rows)), rows, rows)
    thread.join()
    for turn in range(30):  # one rank after the other
        if rank == turn % 3:
            time.sleep(0.01)
            dist.barrier()
        else:
            dist.barrier()
    for peer in (1, 2) if rank == 0 else ():
        dist.send(note, peer, tag=9)
    if early:
        early.wait()
    pair = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(torch.ones(1), group=pair)
    dist.barrier()
    """


@pytest.mark.parametrize("setup", ["unisono", "watched"])
def test_nothing_is_said_of_a_program_that_is_only_awkward(
    program: WriteProgram, setup: str
) -> None:
    outcome = run_on_ranks(program(AWKWARD), 3, setup)
    assert outcome.ended
    late = re.compile("never reached|continued after")  # perhaps because the machine is busy
    assert [verdict for verdict in outcome.verdicts if not late.search(verdict)] == []


COLLECTS = """
    import gc, time
    import torch, torch.distributed as dist

    rank = dist.get_rank()
    kept = [[number, {}] for number in range(100_000)]
    gc.disable()
    dist.barrier()
    for step in range(50):
        time.sleep(0.005)
        if step % 3 == rank:
            gc.collect()
        dist.all_reduce(torch.ones(4))
        dist.all_reduce(torch.ones(1))
"""
KEEPS_THE_GIL = """
    import threading, time
    import torch, torch.distributed as dist

    def count():
        number = 0
        while True:
            number += 1

    if dist.get_rank() == 1:
        threading.Thread(target=count, name="counter", daemon=True).start()
    for _ in range(100):
        for _ in range(4):
            time.sleep(0.001)
        dist.all_reduce(torch.ones(4))
"""


@pytest.mark.provokes
@pytest.mark.parametrize(
    ("source", "said"),
    [
        (COLLECTS, r"garbage collection makes ranks 0-2 of group world late in turn: .* per step"),
        (KEEPS_THE_GIL, r"rank 1 is slow: .* in thread counter, which keeps the GIL"),
    ],
    ids=["collects", "keeps the GIL"],
)
def test_why_ranks_are_slow(program: WriteProgram, source: str, said: str) -> None:
    outcome = run_on_ranks(program(source), 3, "watched")
    assert any(re.search(said, verdict) for verdict in outcome.verdicts), outcome.said


@pytest.mark.provokes
def test_a_key_that_nobody_sets_is_named() -> None:
    for _, setup, outcome in run_corpus("key_that_nobody_sets"):
        assert (
            "for the key 'checkpoint-3' of torch's Store; no rank has set one like it"
            in (outcome.verdicts[0])
        ), (setup, outcome.said)


# -- from records to a verdict -------------------------------------------------------------------


def where(states: dict[int, Whereabouts]) -> object:
    return lambda process: states.get(process[1], Whereabouts())


def test_the_sentence() -> None:
    stuck = group([record(1), record(2, "waiting")], [record(1), record(2, "waiting")], [record(1)])
    states = {102: Whereabouts(location="data.py:41 in load", doing="lock.acquire", in_call=False)}
    report = hang([stuck], waits([stuck])[0], where(states))  # type: ignore[arg-type]
    assert report is not None
    assert report.verdict == (
        "rank 2 never reached all_reduce #2 of group dp (train.py:2): it is in data.py:41, "
        "in lock.acquire"
    )
    assert (report.kind, report.culprits, report.site) == ("hang", (2,), "data.py:41")
    assert "last call that it finished: all_reduce #1 (train.py:1)" in str(report)
    assert "ranks 0 and 1" in str(report)


def test_of_a_receive_from_anybody_who_could_have_sent_is_to_blame() -> None:
    receives = record(2, "waiting", operation="recv", call=None, tag=0)
    stuck = group([record(1), receives], [record(1), record(2, "waiting")], [record(1)])
    states = {102: Whereabouts(location="train.py:9 in main", doing="time.sleep", in_call=False)}
    report = hang([stuck], waits([stuck], 101)[0], where(states))  # type: ignore[arg-type]
    assert report is not None
    assert report.verdict.startswith(
        "rank 2 never posted the match for rank 0's recv from any rank ("
    )
    assert report.site == "train.py:9"


@pytest.mark.parametrize(
    ("whereabouts", "expected"),
    [
        (Whereabouts(state="has ended"), True),
        (Whereabouts(state="is stopped"), False),
        (Whereabouts(location="a.py:1 in f", in_call=False), False),
        (Whereabouts(location="a.py:1 in f", in_call=False, is_abandoned=True), True),
    ],
)
def test_which_hangs_cannot_resolve(whereabouts: Whereabouts, expected: bool) -> None:
    stuck = group([record(1), record(2, "waiting")], [record(1)])
    ask: Any = where({101: whereabouts})
    report = hang([stuck], waits([stuck])[0], ask)
    assert report is not None
    assert is_certain(report, ask) == expected


def test_of_ranks_that_have_ended_the_one_with_fewer_calls_is_to_blame() -> None:
    """Rank 2 ended first, and rank 0 because of that, in the call after which rank 1 went on."""
    stuck = group([record(1), record(2)], [record(1), record(2), record(3, "waiting")], [record(1)])
    states = {100: Whereabouts("raised RuntimeError"), 102: Whereabouts("raised ValueError")}
    report = hang([stuck], waits([stuck])[0], where(states))  # type: ignore[arg-type]
    assert report is not None
    assert (report.culprits, "it raised ValueError after" in report.verdict) == ((2,), True)


def test_a_rank_that_was_killed_in_a_message_is_shown_there() -> None:
    """gloo aborts a process that receives more than it expects."""
    receives = record(2, "waiting", operation="recv", call=None, tag=0, peer=0)
    stuck = group([record(1), record(2, "waiting", call=2)], [record(1), receives])
    states = {101: Whereabouts("was killed by SIGABRT")}
    report = hang([stuck], waits([stuck], 100)[0], where(states))  # type: ignore[arg-type]
    assert report is not None
    assert report.verdict.endswith(
        "it was killed by SIGABRT after all_reduce #1 (train.py:1), "
        "in recv from rank 0 (tag 0) (train.py:2)"
    )
    assert report.site == "train.py:2"


@pytest.mark.parametrize(
    ("finished", "heard", "expected"),
    [
        ({}, [record(1)], "; it had reached all_reduce #3 (train.py:3 on rank 0)"),
        ({}, [], "; it had reached all_reduce #3 (train.py:3 on rank 0)"),
        ({}, [record(3, "waiting")], "; last seen 7 s ago, in all_reduce #3 (train.py:3)"),
        ({}, [record(3)], "; last seen 7 s ago, after all_reduce #3 (train.py:3)"),
        ({}, [record(9, call=None)], "; last seen 7 s ago, after all_reduce (train.py:9)"),
        # calls that end without all ranks, or of which nobody knows how they ended, prove nothing
        ({"operation": "broadcast"}, [], ""),
        ({"operation": "all_to_all"}, [], ""),
        ({"bytes": 0}, [], ""),
        ({"status": "NOT_YET"}, [], ""),
        (
            {"status": "NOT_YET"},
            [record(1)],
            "; last seen 7 s ago, after all_reduce #1 (train.py:1)",
        ),
    ],
)
def test_how_far_a_rank_had_come_that_nobody_can_describe(
    finished: dict[str, object], heard: list[Record], expected: str
) -> None:
    stuck = group([record(3, **finished), record(4, "waiting")], heard)
    gone = replace(stuck.ranks[1], heard_s=time.monotonic() - 7 if heard else 0.0)
    stuck = replace(stuck, ranks=(stuck.ranks[0], gone))
    states = {101: Whereabouts(state="has ended", is_described=False)}
    report = hang([stuck], waits([stuck], 100)[0], where(states))  # type: ignore[arg-type]
    assert report is not None
    never = "rank 1 never finished all_reduce #4 of group dp (train.py:4)"
    assert report.verdict == f"{never}: it has ended{expected}"
    assert (report.kind, report.culprits) == ("lost", (1,))
    assert report.site == "".join(re.findall(r"train.py:\d", expected))
    assert f"rank 1 (pid 101) has ended{expected}" in str(report)
    assert "the last call that it finished" not in str(report)


def test_a_message_that_was_begun_when_last_heard_matches_nothing() -> None:
    message: dict[str, Any] = {"call": None, "tag": 0}
    sends = record(2, "waiting", operation="send", peer=1, **message)
    receives = record(2, "waiting", operation="recv", peer=0, **message)
    stuck = group([record(1), sends], [record(1), receives])
    assert waits([stuck], 100)[0].missing() == []
    gone = replace(stuck.ranks[1], heard_s=time.monotonic() - 7)
    stuck = replace(stuck, ranks=(stuck.ranks[0], gone))
    states = {101: Whereabouts(state="has ended", is_described=False)}
    report = hang([stuck], waits([stuck], 100)[0], where(states))  # type: ignore[arg-type]
    assert report is not None
    assert report.verdict == (
        "rank 1 never finished rank 0's send to rank 1 (tag 0) of group dp (train.py:2): it has "
        "ended; last seen 7 s ago, in recv from rank 0 (tag 0) (train.py:2)"
    )


def test_whoever_waits_for_nobody_is_to_blame() -> None:
    """Rank 0 waits for 1 in one group, 1 waits for 2 in another, and 2 is asleep."""
    first = group([record(1, "waiting")], [], name="a", segment=1)
    second = GroupRecords(
        "b",
        2,
        (
            RankRecords(0, 1, 101, (record(1, "waiting"),)),
            RankRecords(1, 2, 102, ()),
        ),
        "gloo",
        (0, 2),
    )
    states = {102: Whereabouts(location="train.py:9 in main", doing="time.sleep", in_call=False)}
    report = hang([first, second], waits([first], 100)[0], where(states))  # type: ignore[arg-type]
    assert report is not None
    assert (report.group, report.culprits, report.site) == ("b", (1,), "train.py:9")
    assert report.details == ("rank 0 waits in all_reduce #1 of group a",)


def test_a_rank_that_is_busy_is_to_blame_whatever_it_has_begun() -> None:
    """Rank 0 waits for 1, which computes while its own work waits for 2."""
    first = group([record(1, "waiting")], [], name="a", segment=1)
    members = RankRecords(0, 1, 101, (record(1, "waiting"),)), RankRecords(1, 2, 102, ())
    second = GroupRecords("b", 2, members, "gloo", (0, 2))
    states = {
        101: Whereabouts(location="train.py:5 in main", doing="matmul", in_call=False),
        102: Whereabouts(location="train.py:9 in main", doing="time.sleep", in_call=False),
    }
    report = hang([first, second], waits([first], 100)[0], where(states))  # type: ignore[arg-type]
    assert report is not None
    assert (report.group, report.culprits, report.site) == ("a", (1,), "train.py:5")


def test_two_ranks_that_take_another_branch_have_not_made_a_call_too_many() -> None:
    def calls(*lines: int) -> list[Record]:
        return [record(number, site=f"t.py:{line}") for number, line in enumerate(lines, 1)]

    usual, other = calls(1, 2), calls(7, 1)
    assert find_shift(group(usual, usual, usual, other)) is not None
    assert find_shift(group(usual, usual, usual, other, other)) is None
    assert find_shift(group(usual, usual, usual, other, calls(8, 1))) is None


def test_different_calls_are_a_mismatch_also_where_nobody_waits() -> None:
    same = [record(1), record(2)]
    report = mismatch([group(same, same, [record(1), record(2, reduction="max")])])
    assert report is not None
    assert (report.kind, report.culprits, report.call) == ("mismatch", (2,), 2)
    assert mismatch([group(same, same, [record(1)])]) is None


def test_of_two_ranks_the_one_whose_calls_no_longer_repeat_is_to_blame() -> None:
    loop = [record(number, site="t.py:7") for number in range(1, 6)]
    goes_on = [*loop, record(6, "waiting", site="t.py:7")]
    stops = [*loop, record(6, "waiting", operation="barrier", site="t.py:3")]
    report = mismatch([group(goes_on, stops)])
    assert report is not None
    assert (report.culprits, report.site) == ((1,), "t.py:3")
    assert report.verdict == (
        "rank 1 called barrier at t.py:3 where rank 0 called all_reduce of float32, 4 elements, "
        "sum, as before: call #6 of group dp"
    )
    first = record(1, site="t.py:7"), record(1, operation="barrier", site="t.py:3")
    unknown = mismatch([group([first[0]], [first[1]])])
    assert unknown is not None
    assert unknown.culprits == (0, 1)
    assert "rank 1 called barrier at t.py:3: call #1" in unknown.verdict


def test_steps_show_which_call_is_missing_where_all_lines_are_alike() -> None:
    def calls(*counts: int) -> list[Record]:
        steps = [step for step, count in enumerate(counts, 1) for _ in range(count)]
        made = [record(at, site="t.py:7", step=step) for at, step in enumerate(steps, 1)]
        return [*made, record(len(made) + 1, operation="barrier", site="t.py:9", step=len(counts))]

    usual = calls(3, 3, 3, 3, 3)
    report = mismatch([group(usual, calls(3, 3, 2, 3, 3), usual)])
    assert report is not None
    assert (report.kind, report.culprits, report.site) == ("apart", (1,), "t.py:7")
    assert "rank 1 made 2 calls in step 3 where the others made 3" in report.verdict
    assert any(detail.startswith("rank 1 called barrier at t.py:9") for detail in report.details)


def test_in_a_cycle_the_rank_whose_calls_no_longer_repeat_is_to_blame() -> None:
    """A pipeline of three: the second stage does not pass on a message, and is in the barrier."""

    def message(number: int, operation: str, peer: int, state: str = "finished") -> Record:
        line = {"recv": 13, "send": 17}[operation]
        more = {"call": None, "tag": 0, "peer": peer, "site": f"t.py:{line}"}
        return record(number, state, operation=operation, **more)

    kinds = ["recv", "send", "recv", "send", "recv", "recv", "send"]
    peers = {"recv": 0, "send": 2}
    middle = [message(at, kind, peers[kind]) for at, kind in enumerate(kinds, 1)]
    barrier = {"operation": "barrier", "call": 1, "site": "t.py:18"}
    first = [message(at, "send", 1) for at in range(1, 5)]
    last = [message(at, "recv", 1) for at in range(1, 4)]
    stuck = group(
        [*first, record(5, "waiting", **barrier)],
        [*middle, record(8, "waiting", **barrier)],
        [*last, message(4, "recv", 1, "waiting")],
    )
    report = hang([stuck], waits([stuck], 102)[0], where({}))  # type: ignore[arg-type]
    assert report is not None
    assert (report.kind, report.culprits, report.site) == ("cycle", (1,), "t.py:13")
    assert report.verdict.startswith(
        "rank 1 made recv from rank 0 (tag 0) of group dp (t.py:13) where send to rank 2 (tag 0) "
        "of group dp (t.py:17) was due, as before; now ranks 1 and 2 wait for each other in calls "
        "and messages: "
    )


def test_a_healthy_rank_that_left_a_loop_is_not_to_blame() -> None:
    """Rank 0 receives once more than rank 1 sends: which of them is wrong nothing tells. In the
    report of a group, all ranks are global."""
    message = {"call": None, "tag": 0, "site": "t.py:7"}
    got = [record(at, operation="recv", peer=1, **message) for at in range(1, 6)]
    sent = [record(at, operation="send", peer=0, **message) for at in range(1, 6)]
    last = record(6, "waiting", operation="recv", peer=1, **message)
    stuck = group([*got, last], [*sent, record(6, "waiting", operation="barrier", site="t.py:9")])
    members = [replace(member, global_rank=member.rank + 4) for member in stuck.ranks]
    stuck = replace(stuck, ranks=tuple(members))
    report = hang([stuck], waits([stuck], 100)[0], where({}))  # type: ignore[arg-type]
    assert report is not None
    assert (report.kind, report.culprits) == ("cycle", (4, 5))
    assert report.details == ("which of them is to blame cannot be told from their calls",)
    assert "ranks 4 and 5 wait for each other" in report.verdict
    assert "rank 4 is in recv from rank 1 (global 5) (tag 0) of group dp" in report.verdict
    absent = [RankReport(0, 4, 1, arrived=True), RankReport(1, 5, 2, arrived=False)]
    said = str(replace(report, waited_s=3.0, ranks=tuple(absent)))
    assert "waiting for 3 s: rank 0 (global 4)" in said


def test_ranks_that_make_groups_in_a_circle_wait_for_each_other() -> None:
    def make(state: str, *members: int) -> Record:
        named = sum(1 << member for member in members)
        return record(1, state, operation="new_group", call=None, bytes=named, site="t.py:5")

    pairs = (0, 1), (1, 2), (0, 2)
    stuck = group(*([make("waiting", *members)] for members in pairs))
    report = hang([stuck], waits([stuck], 100)[0], where({}))  # type: ignore[arg-type]
    assert report is not None
    assert (report.kind, report.culprits) == ("cycle", (0, 1, 2))
    assert "rank 1 is in new_group of ranks 1 and 2 of group dp (t.py:5)" in report.verdict
    all_there = group(*([make("waiting", 0, 1)] for _ in range(2)))
    assert waits([all_there])[0].missing() == []


def test_a_branch_that_makes_the_same_call_is_no_fault() -> None:
    """Two lines of a program may make one call; only a shift is reported."""
    usual = [record(1, site="t.py:1"), record(2, site="t.py:9"), record(3, "waiting")]
    other = [record(1, site="t.py:1"), record(2, site="t.py:7")]
    report = hang(
        [found := group(usual, usual, other)],
        waits([found])[0],
        where({102: Whereabouts(location="t.py:8", in_call=False)}),  # type: ignore[arg-type]
    )
    assert report is not None
    assert report.kind == "hang"


def test_whose_call_has_just_failed_had_waited_too() -> None:
    """Ranks 0 and 1 wait for 2 in one group until that fails, while 2 waits for them in another."""
    lost = [record(1, "failed", arrived_s=5.0)]
    few = group(lost, lost, [], name="few", segment=1)
    all_of_them = group([], [], [record(1, "waiting", arrived_s=5.0)], name="world", segment=2)
    stuck = next(wait for wait in newest_calls([few], 100))
    report = hang([few, all_of_them], stuck, where({}))  # type: ignore[arg-type]
    assert report is not None
    assert (report.kind, report.culprits) == ("cycle", (0, 2))
    assert "rank 0 is in all_reduce #1 of group few" in report.verdict


def test_the_late_one_is_named_by_arrivals_and_not_by_durations() -> None:
    calls = range(1, 11)
    punctual = [record(n, arrived_s=n * 1.0, ended_s=n + 0.3) for n in calls]
    late = [record(n, arrived_s=n + 0.25, ended_s=n + 0.3) for n in calls]
    (found,) = summarise([group(punctual, punctual, late)]).calls
    assert (found.latest, found.latest_count, found.count) == (2, 10, 10)
    assert found.latest_by_s == pytest.approx(0.25)
    assert found.transfer_s == pytest.approx(0.05)
    assert found.wait_s == pytest.approx(0.25)
    assert found.busbw == pytest.approx(16 * 4 / 3 / 0.05)
    slow = [record(n, arrived_s=n + 0.0, ended_s=n + 0.3) for n in calls]
    (found,) = summarise([group(slow, slow, slow)]).calls
    assert (found.latest, found.transfer_s) == (-1, pytest.approx(0.3))


@pytest.mark.parametrize(
    ("expression", "callee"),
    [
        ("lock.acquire()", "lock.acquire"),
        ("threading.Event().wait(3)", "threading.Event().wait"),
        ("dist.all_reduce(torch.ones(4), group=g)", "dist.all_reduce"),
        ('store.get("a (b")', "store.get"),
        ("queues[rank].get(block=True)", "queues[rank].get"),
        ("a + f(x)", ""),
        ("(a + b)", ""),
        ("await f()", ""),
        ("items[0]", ""),
        (")", ""),
        ("", ""),
    ],
)
def test_what_an_expression_calls(expression: str, callee: str) -> None:
    assert callee_of(expression) == callee


# -- reports -------------------------------------------------------------------------------------


def test_a_current_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.chdir(tmp_path / "scratch")
    (tmp_path / "scratch").rmdir()
    assert short_path(__file__) == "test_watch.py"
    assert lines_of_site("train.py:8") == ()
    assert lines_of_site("test_watch.py:1")[0].startswith(">    1")


def test_a_report_is_saved_and_read_again(tmp_path: Path) -> None:
    rank = RankReport(1, 1, 42, False, place="a.py:1 in f", stack=("main:", "  a.py:1 in f"))
    report = Report("hang", "rank 1 sleeps", "dp", "gloo", "barrier", 3, (1,), ranks=(rank,))
    report.save(tmp_path / "report.json")
    again = load(tmp_path / "report.json")
    assert again == report
    (tmp_path / "other.json").write_text("{}")
    for name, why in (("other.json", "is not a report"), ("none.json", "cannot be read")):
        with pytest.raises(UnisonoError, match=why):
            load(tmp_path / name)


@pytest.mark.ranks(3)
def test_an_exception_carries_its_report(comm: Communicator, shared_tmp_path: Path) -> None:
    watch.start(hang_s=30)
    comm.timeout_s = 2.0
    if comm.rank == 1:
        assert eventually(lambda: len(list(shared_tmp_path.iterdir())) == 2)
    with pytest.raises(UnisonoError) as caught:
        comm.all_reduce(torch.ones(3))
    report = caught.value.report  # type: ignore[attr-defined]
    assert (report.kind, report.culprits) == ("hang", (1,))
    if comm.rank == 1:
        return  # late: it finds the others waiting, and is still to blame
    assert "test_watch.py" in report.ranks[1].place or "programs.py" in report.ranks[1].place
    assert "test_watch.py:" in report.ranks[comm.rank].place
    called = r"unisono.watch: rank 1 never reached all_reduce #1 of group \w+ \(.*test_watch.py:"
    assert re.match(called, caught.value.__notes__[0])
    (shared_tmp_path / str(comm.rank)).touch()


@pytest.mark.ranks(2)
def test_a_group_that_somebody_ended_needs_no_report(comm: Communicator) -> None:
    watch.start()
    few = comm.split([0, 1])
    if comm.rank == 0:
        few.abort("enough")
    with pytest.raises(GroupAborted, match="enough") as caught:
        few.barrier()
    assert caught.value.report is None
    comm.barrier()


@pytest.mark.ranks(2)
def test_a_refused_call_is_described_as_such(comm: Communicator) -> None:
    watch.start()
    outputs = [torch.ones(1 + comm.rank) for _ in range(2)]
    with pytest.raises(ValueError if comm.rank else UnisonoError) as caught:
        comm.all_to_all(outputs, [torch.ones(1), torch.ones(1)])
    if comm.rank == 0:
        report = caught.value.report  # type: ignore[attr-defined]
        assert "rank 1 called all_to_all with arguments that it refused at" in report.verdict


@pytest.mark.ranks(2)
def test_a_call_that_goes_on_while_all_are_asked_is_not_reported(
    comm: Communicator, shared_tmp_path: Path
) -> None:
    asked = shared_tmp_path / "asked"
    if comm.rank == 1:
        assert eventually(asked.exists)
        comm.all_reduce(torch.ones(3))
        return
    watch.start(hang_s=0.2)
    told: list[Process] = []

    def over() -> bool:
        return not waits(read_process(os.getpid()), os.getpid())

    def in_its_time(process: Process) -> Whereabouts:
        asked.touch()
        assert eventually(over)
        told.append(process)
        return Whereabouts(location="data.py:41 in load", in_call=False)

    watch._monitor.sight.where = in_its_time  # type: ignore[union-attr, method-assign]
    comm.all_reduce(torch.ones(3))
    assert eventually(lambda: len(told) == comm.size)
    monitor = watch._monitor
    watch.stop()  # what it has started is over by then
    assert monitor is not None
    assert monitor.journal.reports == []


# -- what it leaves alone ------------------------------------------------------------------------


def test_a_handler_of_the_program_stays(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []
    before = signal.signal(SIGNAL, lambda number, frame: calls.append(number))
    try:
        with caplog.at_level(logging.WARNING, "unisono"):
            watch.start()
        os.kill(os.getpid(), SIGNAL)
        assert eventually(lambda: bool(calls))
        assert "handles signal" in caplog.text
    finally:
        watch.stop()
        signal.signal(SIGNAL, before)


def test_a_handler_that_the_program_sets_later_stays_too() -> None:
    watch.start()
    calls: list[int] = []
    before = signal.signal(SIGNAL, lambda number, frame: calls.append(number))
    try:
        watch.stop()
        os.kill(os.getpid(), SIGNAL)
        assert eventually(lambda: bool(calls))
    finally:
        signal.signal(SIGNAL, before)


def test_a_process_that_lost_our_handler_is_not_sent_the_signal(program: WriteProgram) -> None:
    made = program("""
        import ctypes, os, signal, sys
        from unisono import watch
        from unisono.watch.stack_server import SIGNAL, ask

        child = os.fork()
        if child == 0:
            watch.start()
            signal.signal(SIGNAL, signal.SIG_DFL)
            sys.setswitchinterval(1000)  # no other thread gets the GIL, which these calls hold
            ctypes.PyDLL(None).kill(os.getpid(), signal.SIGSTOP)
            ctypes.PyDLL(None).sleep(60)
        os.waitpid(child, os.WUNTRACED)
        os.kill(child, signal.SIGCONT)
        print("stacks:", ask(child), "ended:", os.waitpid(child, os.WNOHANG)[0])
        os.kill(child, signal.SIGKILL)
        """)
    done = made.run()
    assert done.stdout == "stacks: [] ended: 0\n", done.stderr


def test_asking_by_signal_harms_no_process_whose_threads_run(program: WriteProgram) -> None:
    made = program("""
        import os, signal, threading, time
        from unisono import watch
        from unisono.processes import signal_thread
        from unisono.watch.stack_server import SIGNAL, _ask_by_signal

        def count(n):
            return n if n < 2 else count(n - 1) + count(n - 2)

        def work():
            while True:
                exec("def run(n): return [count(i) for i in range(n)]\\nrun(9)", {"count": count})

        child = os.fork()
        if child == 0:
            watch.start()
            for _ in range(4):
                threading.Thread(target=work, daemon=True).start()
            os.kill(os.getpid(), signal.SIGSTOP)
            while True:
                count(10)
        os.waitpid(child, os.WUNTRACED)
        os.kill(child, signal.SIGCONT)
        names = {stack.thread for stack in _ask_by_signal(child, SIGNAL)}
        for _ in range(1000):
            signal_thread(child, child, SIGNAL)
            time.sleep(0.003)
        ended = os.waitpid(child, os.WNOHANG)[0]
        os.kill(child, signal.SIGKILL)
        print("ended:", ended, "main:", "MainThread" in names)
        """)
    done = made.run()
    assert done.stdout == "ended: 0 main: True\n", done.stderr


def test_a_thread_that_holds_the_gil_is_found(program: WriteProgram) -> None:
    made = program("""
        import ctypes, os, signal, threading
        from unisono import watch
        from unisono.watch.stack_server import ask

        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            watch.start()
            libc = ctypes.PyDLL(None)
            thread = threading.Thread(target=lambda: libc.write(writer, b"x", 1) + libc.sleep(60))
            thread.start()
            thread.join()
        os.read(reader, 1)
        print(*(stack.program_frame().line for stack in ask(child)))
        os.kill(child, signal.SIGKILL)
        """)
    lines = made.path.read_text().splitlines()
    holder = next(n for n, line in enumerate(lines, 1) if "libc.sleep" in line)
    done = made.run()
    main, *others = map(int, done.stdout.split())
    assert main in (holder + 1, holder + 2), done
    assert holder in others, done


def test_a_forked_child_that_watches_itself_is_found(program: WriteProgram) -> None:
    script = program("""
        import os, time
        from unisono import watch
        from unisono.watch.stack_server import ask
        watch.start()
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            assert not watch.is_on()
            watch.start()
            os.write(writer, b"x")
            time.sleep(60)
        os.read(reader, 1)
        print(ask(child)[0].program_frame())
        os.kill(child, 9)
        os.waitpid(child, 0)
    """)
    done = script.run()
    assert done.stdout == "program.py:12 in <module>\n", done.stderr


def test_bad_settings() -> None:
    before = watch.is_on()
    with pytest.raises(ValueError, match="must be positive"):
        watch.start(hang_s=0)
    assert watch.is_on() == before


@pytest.fixture
def environment() -> Iterator[None]:
    """Restore the environment, and torch's debug level."""
    before = dict(os.environ)
    yield
    debug("off")
    os.environ.clear()
    os.environ.update(before)
    dist.set_debug_level_from_env()


@pytest.mark.usefixtures("environment")
def test_debug_levels() -> None:
    before = dict(os.environ)
    detail = debug("detail")
    assert detail["TORCH_DISTRIBUTED_DEBUG"] == "INFO"
    assert "TUNING" in detail["NCCL_DEBUG_SUBSYS"].split(",")
    assert dist.get_debug_level() == dist.DebugLevel.INFO
    info = debug("info")
    assert debug("INFO") == info  # torch's and NCCL's spelling
    assert info.keys() < detail.keys()
    assert all(os.environ[name] == value for name, value in info.items())
    assert "NCCL_DEBUG_SUBSYS" not in os.environ  # NCCL's own choice is fine
    debug("off")
    assert dist.get_debug_level() == dist.DebugLevel.OFF
    assert dict(os.environ) == before
    with pytest.raises(ValueError, match="level is"):
        debug("loud")  # type: ignore[arg-type]


@pytest.mark.ranks(2, backend="gloo")
def test_ddp_on_gloo_lives_with_every_debug_level(process_group: Any, environment: None) -> None:
    """With torch's own DETAIL it ends in a segmentation fault."""
    for level in ("info", "detail"):
        debug(level)  # type: ignore[arg-type]
        model = DistributedDataParallel(torch.nn.Linear(2, 1), process_group=dist.new_group())
        model(torch.full((2,), dist.get_rank() + 1.0)).sum().backward()
        assert model.module.weight.grad.tolist() == [[1.5, 1.5]]


@pytest.mark.usefixtures("environment")
def test_debug_keeps_what_the_user_has_set() -> None:
    os.environ.update(NCCL_DEBUG="TRACE", TORCH_DISTRIBUTED_DEBUG="OFF")
    assert debug("detail")["NCCL_DEBUG"] == "TRACE"
    assert dist.get_debug_level() == dist.DebugLevel.OFF
    os.environ["NCCL_DEBUG_SUBSYS"] = "TUNING"  # after the call: it also counts
    assert debug("off") == {
        "TORCH_DISTRIBUTED_DEBUG": "OFF",
        "NCCL_DEBUG": "TRACE",
        "NCCL_DEBUG_SUBSYS": "TUNING",
    }
    debug("detail")
    assert os.environ["NCCL_DEBUG_SUBSYS"] == "TUNING"


# -- tools ---------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_a_trace_has_every_call_of_every_rank(comm: Communicator, shared_tmp_path: Path) -> None:
    group = comm.split(range(2), "traced")
    assert group is not None
    group.barrier()
    with watch.trace(shared_tmp_path / "trace.json"):
        for _ in range(5):
            group.all_reduce(torch.ones(100))
        group.barrier()
    comm.barrier()
    if comm.rank == 0:
        trace = json.loads((shared_tmp_path / "trace.json").read_text())
        (thread,) = {  # others may come from groups that a failed test has left
            event["tid"]
            for event in trace["traceEvents"]
            if event["args"].get("name") == f"{group.name} (unisono)"
        }
        ours = [event for event in trace["traceEvents"] if event["tid"] == thread]
        events = [event for event in ours if event["ph"] == "X"]
        for rank in range(2):
            calls = [event["name"] for event in events if event["pid"] == rank]
            assert calls[:5] == ["all_reduce"] * 5
        for event in events:
            assert event["dur"] >= 0
            assert event["args"]["skew_us"] >= event["args"]["late_us"] >= 0
        assert events[0]["args"]["bytes"] == 400
        names = {event["args"]["name"] for event in ours if event["name"] == "process_name"}
        assert {name.partition(" (")[0] for name in names} == {"rank 0", "rank 1"}


@pytest.mark.ranks(2)
def test_top_finds_the_job_it_runs_in(comm: Communicator) -> None:
    group = comm.split(range(2), "shown")  # a failed test may have left others
    assert group is not None
    for _ in range(10):
        group.all_reduce(torch.ones(100))
    if comm.rank == 0:
        done = CliRunner().invoke(main, ["top", "--json"])
        jobs = [job for job in json.loads(done.output) if os.getpid() in job["pids"]]
        assert len(jobs) == 1
        rows = [row for row in jobs[0]["rows"] if row["group"] == group.name]
        assert [row["rank"] for row in rows] == [0, 1]
        assert rows[0]["calls"] == 10
        assert CliRunner().invoke(main, ["top", "--once", "--stacks"]).exit_code == 0
    comm.barrier()


@pytest.mark.ranks(3)
def test_a_job_is_shown_once_also_where_a_rank_has_left_a_group(shared_tmp_path: Path) -> None:
    """Ranks 0 and 1 share a group; only rank 2 still holds the one that it had with rank 1."""
    rank = int(os.environ["UNISONO_RANK"])
    done = shared_tmp_path / "done"
    if rank > 0:
        with connect(str(shared_tmp_path / "left"), rank - 1, 2) as left:
            left.barrier()
            if rank == 2:
                assert eventually(done.exists)
    if rank < 2:
        with connect(str(shared_tmp_path / "kept"), rank, 2) as kept:
            kept.barrier()
            if rank == 0:
                jobs = [job for job in top.jobs() if os.getpid() in job.pids]
                done.touch()
                assert [(len(job.pids), len(job.rows)) for job in jobs] == [(3, 4)]
            kept.barrier()


@pytest.mark.ranks(2)
def test_a_watched_process_keeps_records_and_reads_what_is_new(comm: Communicator) -> None:
    rank = comm.rank
    watch.start(hang_s=60)
    with comm.split([0, 1]) as later:
        for calls in (3, 5, 100, 2000, 1):  # fewer than are kept, more, and more than the ring has
            for _ in range(calls):
                comm.all_reduce(torch.ones(1))
            later.barrier()
            work = comm.irecv(torch.ones(1), 1 - rank)  # under way at the next look
            known = read_process(os.getpid(), 64)
            for made in (comm, later):
                (kept,) = [group for group in known if group.name == made.name]
                fresh = record_reader.read_segment(made.transport.group.state()["descriptor"], 64)
                assert fresh is not None
                assert _own_facts(kept) == _own_facts(fresh)
            later.barrier()
            comm.send(torch.ones(1), 1 - rank)
            work.wait()
    assert later.name not in [group.name for group in read_process(os.getpid(), 64)]


def _own_facts(group: GroupRecords) -> list[Record]:
    """This rank's records without times, which each reader converts by its own clock."""
    own = next(member for member in group.ranks if member.pid == os.getpid())
    return [replace(known, arrived_s=0, started_s=0, ended_s=0) for known in own.records]


@pytest.mark.ranks(3)
def test_a_summary_counts(comm: Communicator) -> None:
    for _ in range(7):
        comm.all_reduce(torch.ones(1000))
    comm.barrier()
    found = {call.operation: call for call in watch.summary().calls if call.group == comm.name}
    assert (found["all_reduce"].count, found["all_reduce"].bytes) == (7, 4000)
    assert found["all_reduce"].ranks == 3
    assert "all_reduce" in str(watch.summary())
    comm.barrier()


def test_the_launcher_speaks_for_ranks_that_could_not(program: WriteProgram) -> None:
    """Both ranks die without output; the launcher has kept their records."""
    script = program("""
        import os, time, numpy, unisono
        comm = unisono.init()
        comm.all_reduce(numpy.ones(3))
        time.sleep(1)  # the launcher looks a few times a second
        if comm.rank == 1:
            os.abort()
        try:
            comm.all_reduce(numpy.ones(3))
        except unisono.PeerLost:
            os.abort()
    """)
    command = ("-m", "unisono", "run", "-n", "2", "--watch")
    done = script.run(before=command)
    assert done.returncode == 128 + signal.SIGABRT
    assert (
        "unisono run: rank 1 never reached all_reduce #2 of group world (program.py:9): it was "
        "killed by SIGABRT after all_reduce #1 (program.py:4)" in done.stderr
    ), done.stderr


@pytest.mark.slow
def test_a_rank_in_two_cycles_tells_of_one(program: WriteProgram) -> None:
    """Rank 1 sends to the left what it should send to the right: 0 waits for 1, and for 2, which
    waits for 1."""
    script = program("""
        import torch, torch.distributed as dist
        dist.init_process_group()
        rank = dist.get_rank()
        for step in range(9):
            right, left = (rank + 1) % 3, (rank - 1) % 3
            if step == 6 and rank == 1:
                right = left
            sent, received = torch.ones(4), torch.zeros(4)
            sends = dist.P2POp(dist.isend, sent, right)
            receives = dist.P2POp(dist.irecv, received, left)
            for work in dist.batch_isend_irecv([sends, receives]):
                work.wait()
    """)
    command = ("-m", "unisono", "run", "-n", "3", "--backend", "unisono", "--watch")
    settings = {"UNISONO_WATCH_HANG_S": "1"}
    done = script.run(before=(*command, "--watch-grace", "4"), environment=settings)
    assert done.returncode == 1
    told = [line for line in done.stderr.splitlines() if line[0:1] == "[" and " wait for" in line]
    assert len(told) == 1, done.stderr
    assert "rank 1 made send to rank 0 (tag 0) of group world (program.py:12) where" in told[0]


# -- watched gloo --------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_backend_that_torch_chose_is_named(program: WriteProgram) -> None:
    script = program("""
        import os, torch.distributed as dist
        from unisono.comm.shared_memory.record_reader import read_process
        dist.init_process_group()
        print([group.backend for group in read_process(os.getpid())])
    """)
    command = ("-m", "unisono", "run", "-n", "2", "--watch", "--no-prefix")
    done = script.run(before=command)
    assert done.stdout.splitlines() == ["['gloo']"] * 2, done.stderr


def test_gloo_is_watched_and_works_as_before(program: WriteProgram) -> None:
    """Every collective gives the same result, the records show it, and nothing is reported."""
    script = program("""
        import os, time
        import torch, torch.distributed as dist
        from unisono.comm.shared_memory.record_reader import read_process
        rank, size = dist.get_rank(), dist.get_world_size()
        x = torch.arange(4.0) + rank
        dist.all_reduce(x)
        assert x.tolist() == [1.0, 3.0, 5.0, 7.0]
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        assert x.tolist() == [2.0, 6.0, 10.0, 14.0]
        parts = [torch.zeros(1) for _ in range(size)]
        dist.all_gather(parts, torch.full((1,), float(rank)))
        assert [p.item() for p in parts] == [0.0, 1.0]
        objects = [None] * size
        dist.all_gather_object(objects, {"rank": rank})
        assert objects == [{"rank": 0}, {"rank": 1}]
        y = torch.zeros(2)
        if rank == 0:
            dist.send(torch.ones(2), 1, tag=5)
        else:
            dist.recv(y, 0, tag=5)
            assert y.tolist() == [1.0, 1.0]
        out = torch.zeros(2)
        dist.all_to_all_single(out, torch.tensor([10.0 * rank, 10.0 * rank + 1]))
        assert out.tolist() == [rank + 0.0, 10.0 + rank]
        pair = dist.new_group([0, 1])
        dist.broadcast(y, src=0, group=pair)
        dist.monitored_barrier()
        dist.barrier()
        deadline = time.monotonic() + 10
        while True:
            groups = {g.name: g for g in read_process(os.getpid())}
            mine = groups["world"].ranks[rank].records
            if all(r.state == "finished" for r in mine) or time.monotonic() > deadline:
                break
        calls = [r.operation for r in mine]
        assert calls.count("all_reduce") == 2 and calls.count("all_to_all") == 1, calls
        assert calls.count("barrier") == 3 and ("send" if rank == 0 else "recv") in calls, calls
        assert all(r.state == "finished" for r in mine), mine
        assert mine[1].site.startswith("program.py:7"), mine[1].site
        assert groups["world"].backend == "gloo" and len(groups) == 2
        dist.barrier()
        dist.destroy_process_group()
        assert not dist.is_initialized()
        print("well")
    """)
    outcome = run_on_ranks(script, 2, "watched")
    assert outcome.ended, outcome.said
    assert all(text.strip() == "well" for text in outcome.said), outcome.said


BROKEN = """
    import os
    import torch.distributed as dist
    from unisono import watch

    watch.start()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    watch._monitor.look_for_differences = None
    dist.destroy_process_group()
    print("destroyed")
"""


def test_a_failure_of_the_watch_does_not_keep_a_program_from_leaving(program: WriteProgram) -> None:
    done = program(BROKEN).run()
    assert (done.returncode, done.stdout) == (0, "destroyed\n"), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.provokes
def test_a_rank_on_another_machine_is_told_apart(program: WriteProgram) -> None:
    """Two of three ranks share a machine: each machine watches its own ranks, and says so if the
    missing rank is not one of them."""
    script = program("""
        import time, sys
        import torch, torch.distributed as dist
        import unisono.watch, unisono.watch.attach as attach
        rank = dist.get_rank()
        unisono.watch.start(hang_s=0.5)
        real = attach._host
        attach._host = lambda: real() + str(rank // 2)
        group = dist.new_group([0, 1, 2], group_desc="dp")
        if rank == 1:
            dist.send(torch.ones(2), 0, group=group)
            work = dist.isend(torch.ones(2), 2, group=group)
        if rank == 0:
            dist.recv(torch.ones(2), 1, group=group)
        if rank == 2:
            time.sleep(3)
            dist.recv(torch.ones(2), 1, group=group)
        dist.all_reduce(torch.ones(1), group=group)
        if rank == 1:
            work.wait()
        found = [r for r in unisono.watch.reports() if r.group == "dp on this machine"]
        print(sorted({(r.kind, r.operation, r.site) for r in found}))
        dist.barrier()
        dist.destroy_process_group()
    """)
    outcome = run_on_ranks(script, 3, "watched")
    assert outcome.ended, outcome.said
    lines = [[line for line in text.splitlines() if line[:1] == "["] for text in outcome.said]
    last = [own[-1] for own in lines]  # what the program has printed
    assert "('elsewhere', 'all_reduce', 'program.py:" in last[0], outcome.said
    assert "('elsewhere', 'all_reduce', 'program.py:" in last[1], outcome.said
    assert last[2] == "[]", outcome.said


@pytest.mark.provokes
def test_check_compares_before_data_moves(program: WriteProgram) -> None:
    script = program("""
        import torch, torch.distributed as dist
        import unisono
        x = torch.ones(3 + dist.get_rank())
        try:
            dist.all_reduce(x)
        except unisono.CollectiveMismatch as error:
            print("refused", x.tolist() == [1.0] * len(x), error.call)
    """)
    outcome = run_on_ranks(script, 2, "checked")
    assert all("refused True 2" in text.splitlines() for text in outcome.said), outcome.said


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.complex64, torch.float8_e5m2])
def test_a_watched_group_names_every_dtype_of_torch(dtype: torch.dtype) -> None:
    from unisono.watch.torch_group import _measure

    code, size_bytes = _measure([torch.empty(3, dtype=dtype)])
    assert (dtype_name(code), size_bytes) == (str(dtype).removeprefix("torch."), 3 * dtype.itemsize)
