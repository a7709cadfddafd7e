"""Reports have the source line of every rank's call, and say where a missing rank is."""

from __future__ import annotations

import inspect
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import typing_extensions

from ranks import attempt, subgroup
from unisono.comm import engine
from unisono.comm.communicator import Communicator
from unisono.comm.engine import native
from unisono.comm.factory import alone
from unisono.comm.shared_memory.record_reader import read_process
from unisono.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    DeadlockError,
    GroupAborted,
    GroupClosed,
)


def line_of(function: Callable[..., Any], text: str) -> str:
    """The place of the line with this text in a function of this file, as a report shows it."""
    lines, first = inspect.getsourcelines(function)
    offset = next(index for index, line in enumerate(lines) if text in line)
    return f"test_source_lines.py:{first + offset} in {function.__name__}"


@pytest.mark.ranks(3)
def test_a_mismatch_shows_each_rank_s_line(comm: Communicator) -> None:
    with pytest.raises(CollectiveMismatch) as caught:
        call_from_three_lines(comm)
    error = caught.value
    expected = [
        line_of(call_from_three_lines, "# blocking"),
        line_of(call_from_three_lines, "# another size"),
        line_of(call_from_three_lines, "# async"),
    ]
    assert [str(site).rpartition("/")[2] for site in error.sites] == expected
    assert all(place in str(error) for place in expected)
    assert error.culprits == (1,)
    assert str(comm.errored) == str(error)


def call_from_three_lines(comm: Communicator) -> None:
    if comm.rank == 0:
        comm.all_reduce(torch.ones(4))  # blocking
    elif comm.rank == 1:
        comm.all_reduce(torch.ones(5))  # another size
    else:
        work = comm.all_reduce(torch.ones(4), async_op=True)  # async
        assert work is not None
        work.wait()


@pytest.mark.ranks(2)
def test_a_work_that_nobody_waits_for_tells_its_line_too(comm: Communicator) -> None:
    if comm.rank == 0:
        begin_and_compute(comm)
    else:
        error = attempt(comm.all_reduce, torch.ones(1))
        assert line_of(begin_and_compute, "# submitted") in str(error)


def begin_and_compute(comm: Communicator) -> None:
    work = comm.barrier(async_op=True)  # submitted
    time.sleep(1.0)  # computes while the other rank detects the mismatch
    assert work is not None
    assert isinstance(work.exception(), CollectiveMismatch)


@pytest.mark.ranks(3)
def test_a_refused_argument_shows_its_line(comm: Communicator) -> None:
    if comm.rank == 1:
        with pytest.raises(ValueError, match="root 9"):
            name_a_root_that_is_none(comm)
    else:
        report = str(attempt(comm.broadcast, torch.ones(3)))
        assert line_of(name_a_root_that_is_none, "root=9") in report
        assert "refused" in report


def name_a_root_that_is_none(comm: Communicator) -> None:
    comm.broadcast(torch.ones(3), root=9)


@pytest.mark.ranks(3)
def test_a_timeout_says_where_the_missing_are(comm: Communicator) -> None:
    comm.timeout_s = 1.5
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(comm.size)]
    comm.all_gather(pids, torch.tensor([os.getpid()]))
    if comm.rank == 1:
        dawdle(2.5)
        os.kill(int(pids[2]), signal.SIGCONT)
    elif comm.rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        error = attempt(comm.all_reduce, torch.ones(4))
        assert isinstance(error, CollectiveTimeout), error
        assert (error.arrived, error.missing) == ((0,), (1, 2))
        assert line_of(dawdle, "# here it stays") in str(error)
        assert f"rank 2 (pid {int(pids[2])}) is stopped and did not answer" in str(error)


def dawdle(seconds: float) -> None:
    time.sleep(seconds)  # here it stays


@pytest.mark.ranks(2)
def test_a_message_in_vain_says_where_the_peer_is(comm: Communicator) -> None:
    comm.timeout_s = 1.0
    if comm.rank == 1:
        dawdle(2.0)
    else:
        error = attempt(comm.recv, torch.ones(2), 1)
        assert line_of(dawdle, "# here it stays") in str(error)


@pytest.mark.ranks(3)
def test_a_deadlock_shows_the_lines(comm: Communicator) -> None:
    with pytest.raises(DeadlockError) as caught:
        send_in_a_circle(comm)
    assert str(caught.value).count(line_of(send_in_a_circle, "# everybody sends")) == 3


def send_in_a_circle(comm: Communicator) -> None:
    comm.send(torch.ones(2), (comm.rank + 1) % comm.size)  # everybody sends


@pytest.mark.ranks([2, 3])
def test_abort_ends_every_wait_and_says_why(comm: Communicator) -> None:
    assert comm.errored is None
    comm.barrier()
    if comm.rank == 1:
        threading.Timer(0.1, comm.abort, ["the loss is not a number"]).start()
    source = None if comm.rank == 1 else 1  # a rank that waits for any source is in no deadlock
    error = attempt(comm.recv, torch.ones(1), source)
    assert isinstance(error, GroupAborted), error
    assert str(error) == f"rank 1 ended group {comm.name} at call #1: the loss is not a number"
    assert error.peer == 1
    assert str(comm.errored) == str(attempt(comm.barrier)) == str(error)


def test_a_group_of_one_can_be_aborted_too() -> None:
    comm = alone()
    assert comm.errored is None
    comm.abort("enough")
    error = attempt(comm.barrier)
    assert isinstance(error, GroupAborted)
    assert str(error) == str(comm.errored) == "rank 0 ended group world: enough"
    comm.close()
    assert isinstance(attempt(comm.barrier), GroupClosed)


@pytest.mark.ranks(2)
def test_a_closed_group_says_so(comm: Communicator) -> None:
    group = subgroup(comm, [0, 1])
    group.barrier()
    group.close()
    assert isinstance(group.errored, GroupClosed)


@pytest.mark.ranks(2)
def test_all_sites_are_kept_on_request(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """With UNISONO_SITES=1 a rank that is stuck in a blocking call has already recorded its
    line."""
    monkeypatch.setenv("UNISONO_SITES", "1")
    group = subgroup(comm, [0, 1])
    reduce_and_tell(group)
    group.barrier()
    (told,) = [known for known in read_process(os.getpid()) if known.name == group.name]
    for rank_records in told.ranks:
        assert str(rank_records.records[0].site).endswith(line_of(reduce_and_tell, "# kept"))
    comm.barrier()
    group.close()


def reduce_and_tell(comm: Communicator) -> None:
    comm.all_reduce(torch.ones(2))  # kept


@pytest.mark.ranks(2)
def test_calls_of_one_function_have_their_own_lines(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that Python makes for the program, and those of other threads."""
    monkeypatch.setenv("UNISONO_SITES", "1")
    group = subgroup(comm, [0, 1])
    for _ in range(2):
        call_in_many_ways(group)
    thread = threading.Thread(target=call_in_many_ways, args=(group,))
    thread.start()
    thread.join()
    group.barrier()
    (told,) = [known for known in read_process(os.getpid()) if known.name == group.name]
    lines = ["# first", "# twice", "# twice", "# mapped", "# mapped", "# of three", "# last"]
    expected = [line_of(call_in_many_ways, text) for text in lines] * 3
    for rank in told.ranks:
        found = [str(record.site).rpartition("/")[2] for record in rank.records]
        assert found[: len(expected)] == expected
    comm.barrier()
    group.close()


def call_in_many_ways(comm: Communicator) -> None:
    comm.barrier()  # first
    _ = comm.barrier(), comm.all_reduce(torch.ones(2))  # twice
    list(map(comm.all_reduce, [torch.ones(2)] * 2))  # mapped
    comm.all_reduce(  # of three
        torch.ones(2),
    )
    comm.barrier()  # last


def code_of_its_own(number: int) -> Callable[..., Any]:
    """A function in its own file, like a notebook cell: its second line is the call."""
    source = "def cell(function, *args):\n    return function(*args)\n"
    names: dict[str, Any] = {}
    exec(compile(source, f"/notebook/cell-{number}.py", "exec"), names)
    cell: Callable[..., Any] = names["cell"]
    return cell


@pytest.mark.ranks(2)
def test_a_program_with_any_number_of_lines_has_its_lines_shown(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook, a service or a test run loads new code again and again."""
    monkeypatch.setenv("UNISONO_SITES", "1")
    group = subgroup(comm, [0, 1])
    for number in range(4500):  # a record has room for 4095
        code_of_its_own(number)(group.barrier)
        if number % 500 == 0 or number > 4490:
            (told,) = [known for known in read_process(os.getpid(), 1) if known.name == group.name]
            (newest,) = told.ranks[comm.rank].records
            assert newest.site == f"/notebook/cell-{number}.py:2 in cell"
    group.close()


def test_code_that_is_no_longer_used_is_let_go() -> None:
    codes = []
    for number in range(3000):
        cell = code_of_its_own(number)
        cell(lambda: native.site_of(sys._getframe(1)))
        codes.append(weakref.ref(cell.__code__))
    del cell
    assert sum(code() is not None for code in codes) < 2000


def test_files_that_are_hidden_late_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch may call before its files are known not to be the program's."""
    monkeypatch.setattr(engine, "_hidden", list(engine._hidden))
    cell = code_of_its_own(1)

    def where() -> str | None:
        return cell(lambda: native.site_of(sys._getframe(1)))  # the program

    assert str(where()).startswith("/notebook/cell-1.py:2")
    engine.hide_files("/notebook")
    try:
        here = where()
    finally:
        monkeypatch.undo()
        engine._prepare_sites(engine.where_is_program)
    assert str(here).rpartition("/")[2].startswith("test_source_lines.py:")


def test_a_function_that_is_marked_as_deprecated_is_called_by_the_program() -> None:
    """As torch marks some of its own: the marking wraps them."""

    @typing_extensions.deprecated("use another")
    def old() -> str:
        return str(native.site_of(sys._getframe(1)))

    engine._prepare_sites(engine.where_is_program)  # as at the import of our torch backend
    with pytest.deprecated_call():
        here = old()
    assert here.rpartition("/")[2].startswith("test_source_lines.py:")


def test_files_that_are_shown_are_a_program_in_a_hidden_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The benchmark calls the engine as a program does."""
    monkeypatch.setattr(engine, "_hidden", [*engine._hidden, "/notebook"])
    monkeypatch.setattr(engine, "_shown", [])
    cell = code_of_its_own(1)
    try:
        engine.show_files("/notebook/other")
        hidden = cell(lambda: native.site_of(sys._getframe(1)))
        engine.show_files("/notebook")
        shown = cell(lambda: native.site_of(sys._getframe(1)))
    finally:
        monkeypatch.undo()
        engine._prepare_sites(engine.where_is_program)
    assert str(hidden).rpartition("/")[2].startswith("test_source_lines.py:")
    assert str(shown).startswith("/notebook/cell-1.py:2")


def test_a_long_line_that_is_cut_inside_a_character() -> None:
    for name in ("é" * 200, "é" * 200 + "a"):  # both ends of one of them are
        made: dict[str, Any] = {}
        exec(compile("import sys\nframe = sys._getframe()", f"/tmp/{name}", "exec"), made)
        assert f"{name[-50:]}:2 in <module>" in native.site_of(made["frame"])
