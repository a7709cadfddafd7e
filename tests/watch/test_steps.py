"""Ranks that make different numbers of calls in a step are detected within the step."""

from __future__ import annotations

import linecache
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy
import pytest
import torch
from made_up_records import group, record

from ranks import subgroup
from unisono import watch
from unisono.comm.communicator import Communicator
from unisono.comm.shared_memory.records import GroupRecords, Record
from unisono.watch import steps
from unisono.watch.steps import Shift, Steps, sentence
from user_programs import eventually

SITE = "train.py:8 in step"


def counted(*ranks: list[int]) -> GroupRecords:
    """For each rank the number of calls in each step, from step 0; the last one is in progress."""
    found = []
    for counts in ranks:
        made = [step for step, count in enumerate(counts) for _ in range(count)]
        found.append([record(number, step=step, site=SITE) for number, step in enumerate(made, 1)])
    return group(*found, name="world")


def look(*ranks: list[int]) -> Shift | None:
    return Steps().look(counted(*ranks))


def test_who_made_fewer_or_more_is_named() -> None:
    shift = look([3, 3, 3, 3, 1], [3, 3, 3, 2, 2], [3, 3, 3, 3, 1])
    assert shift is not None
    assert (shift.step, shift.counts, shift.odd, shift.first) == (3, (3, 2, 3), (1,), 10)
    assert sentence(counted([1], [1], [1]), shift) == (
        "rank 1 made 2 calls in step 3 where the others made 3: it left out 1 all_reduce "
        "(train.py:8), and the calls of group world have been shifted since"
    )
    both = counted([3, 3, 3, 3, 1], [3, 3, 3, 1, 3], [3, 3, 3, 3, 1])
    ranks = [replace(r, records=tuple(map(_last_is_a_barrier, r.records))) for r in both.ranks]
    shift = Steps().look(replace(both, ranks=tuple(ranks)))
    assert shift is not None
    assert "made 3: it left out 1 all_reduce and 1 barrier (train" in sentence(both, shift)
    shift = look([3, 3, 3, 4, 1], [3, 3, 3, 3, 2])  # of two, the one that differs from before
    assert shift is not None
    assert shift.odd == (0,)


def _last_is_a_barrier(call: Record) -> Record:
    """The third call of every step, that is."""
    return replace(call, operation="barrier") if (call.number % 3 == 0) else call


def test_what_is_no_shift() -> None:
    assert look([3, 3, 3, 3, 1], [3, 3, 3, 2]) is None  # not over yet
    assert look([3, 5, 2, 3, 1], [3, 5, 2, 3, 2]) is None  # steps may differ, ranks may not
    assert look([1, 0, 1, 0, 1, 1], [1, 1, 1, 1, 1, 1]) is None  # other optimizers
    assert look([9], [3, 3, 3, 3]) is None  # a rank that steps none
    assert look([3, 3, 6, 3, 3, 1], [3, 3, 3, 3, 3, 3]) is None  # a step left out, not a call
    own = [3, 3, 3, 0, 3, 0, 0, 3, 1]
    assert look(own, [3] * 6, [3] * 6) is None  # an optimizer that only one rank has
    mixed = counted([3, 3, 3, 3, 1], [3, 3, 3, 2, 2])
    records = (*mixed.ranks[0].records, record(14, step=0))
    threads = replace(mixed, ranks=(replace(mixed.ranks[0], records=records), mixed.ranks[1]))
    assert Steps().look(threads) is None  # another thread calls, too


def test_passes_of_models_in_subgroups_say_nothing_of_the_world(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks 2 and 3 train another model, and make more passes between the calls of the world."""
    apart = [3, 3, 3, 3, 1], [3, 3, 3, 3, 1], [3, 3, 3, 0, 3, 1], [3, 3, 3, 0, 3, 1]
    monkeypatch.setattr(steps, "are_forward", True)
    monkeypatch.setattr(steps, "_size", 4)
    assert look(*apart) is not None
    monkeypatch.setattr(steps, "_size", 2)
    assert look(*apart) is None


def test_steps_count_from_the_beginning_of_the_group() -> None:
    """Rank 1 had made two more steps, alone, before the group was created."""
    ahead = counted([3, 3, 3, 3, 1], [0, 0, 3, 3, 3, 3, 1], [3, 3, 3, 3, 1])
    assert Steps().look(ahead) is None
    shift = Steps().look(counted([3, 3, 3, 3, 1], [0, 0, 3, 3, 3, 2, 2], [3, 3, 3, 3, 1]))
    assert shift is not None
    assert (shift.odd, shift.counts) == ((1,), (3, 2, 3))


def test_steps_that_have_left_the_records_are_summed_up() -> None:
    known = Steps()
    assert known.look(counted(*[[2, 2, 2, 2, 1]] * 3)) is None
    after = counted([2] * 20, [2] * 6 + [1] + [2] * 13, [2] * 20)
    short = replace(
        after,
        ranks=tuple(
            replace(rank_records, records=rank_records.records[-12:])
            for rank_records in after.ranks
        ),
    )
    shift = known.look(short)
    assert shift is not None
    assert (shift.since, shift.odd) == (4, (1,))
    assert shift.counts[0] - shift.counts[1] == 1


def test_steps_that_cannot_be_compared_are_never_summed_up() -> None:
    """Rank 0 steps an optimizer of its own, and the records of that are gone; a call more in a
    later step, which all ranks make, is no shift."""
    known = Steps()
    calls = [3, 3, 3, 3, 3, 3, 4, 3, 3, 3, 3, 3]
    whole = counted([3, 3, 3, 0, *calls[3:]], calls, calls)
    assert known.look(whole) is None
    for kept in range(30, 3, -1):
        ranks = (replace(member, records=member.records[-kept:]) for member in whole.ranks)
        assert known.look(replace(whole, ranks=tuple(ranks))) is None


@pytest.mark.ranks(3)
@pytest.mark.provokes
@pytest.mark.parametrize("marked", [False, True], ids=["optimizer", "marked"])
def test_a_call_left_out_is_found_while_the_program_runs(comm: Communicator, marked: bool) -> None:
    watch.start(hang_s=2)
    with ThreadPoolExecutor(1) as fresh:  # which has counted no step for an earlier test
        fresh.submit(leave_a_call_out, comm, marked).result()


def leave_a_call_out(world: Communicator, marked: bool) -> None:
    comm = subgroup(world, range(world.size))
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.zeros(2)
    optimizer = torch.optim.SGD([parameter], 0.1)
    for step in range(6):
        for part in range(3):
            if (comm.rank, step, part) != (1, 3, 1):
                comm.all_reduce(numpy.ones(4))  # the line that the verdict names
        if marked:
            watch.step()
        else:
            optimizer.step()
    assert eventually(lambda: any(report.kind == "apart" for report in watch.reports()))
    first = next(report for report in watch.reports() if report.kind == "apart")
    assert first.culprits == (1,)
    assert "rank 1 made 2 calls in step" in first.verdict
    assert "where the others made 3: it left out 1 all_reduce" in first.verdict
    assert re.search(r"test_steps\.py:(\d+)$", first.site), first.site
    line = int(first.site.rpartition(":")[2])
    assert "the line that the verdict names" in linecache.getline(__file__, line)
    if comm.rank == 1:  # so that no rank is left waiting
        comm.all_reduce(numpy.ones(4))
    comm.close()
