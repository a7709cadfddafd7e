"""Fixtures that start ranks, and the rule that a test run leaves nothing behind."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from alarms import Alarms
from user_programs import Program, WriteProgram, write_program

if TYPE_CHECKING:  # it imports torch, which the process that distributes the tests does not need
    from ranks import RankPool


def pytest_configure(config: pytest.Config) -> None:
    # A script's `make test &` ignores SIGINT, and everything that it starts would inherit that.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.environ.get("UNISONO_WATCH") == "1" and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Alarms(Path(os.environ["UNISONO_WATCH_FOLDER"])))
    elif not os.environ.get("UNISONO_WATCH_FOLDER"):  # else reports would stay behind
        folder = os.environ["UNISONO_WATCH_FOLDER"] = tempfile.mkdtemp(
            prefix="unisono-saved-by-tests-"
        )
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


LEFT_TO_TEST_SLOW = (
    "test_examples.py::test_ranks_are_killed_and_the_losses_stay_the_same",
    "test_plugin.py::test_choosing_tests_and_stopping_early",
    "test_plugin.py::test_ranks_that_cannot_serve_say_why",
    "test_plugin.py::test_coverage_has_what_only_ranks_run[xdist]",
    "test_plugin.py::test_each_worker_of_xdist_has_its_own_ranks",
    "test_plugin.py::test_also_where_the_suite_was_started_with_sigint_ignored",
    "test_plugin.py::test_a_worker_s_ranks_keep_nothing_of_a_test_that_is_over",
    "test_bench.py::test_ctrl_c_saves_what_was_measured",
    "test_plan_command.py::test_sizes_are_drawn",
    "test_plan_command.py::test_tables_keep_their_figures_however_narrow",
    "test_hosts_by_choice.py::test_torch_s_groups_follow",
    "test_stress.py::test_thousands_of_small_calls[4ranks]",
    "test_stress.py::test_random_programs[8ranks]",
    "test_fault_fuzz.py::test_one_fault[seeds 15-29]",
    "test_after_faults.py::test_a_new_world_after[a mismatch]",
    "test_saved_reports.py::test_the_page_shows_what_its_program_leads_to",
    "test_watch.py::test_nothing_is_said_of_a_program_that_is_only_awkward[watched]",
    "test_watch.py::test_a_rank_on_another_machine_is_told_apart",
    "test_sanitizer.py::test_under_torchrun_every_rank_ends_with_the_status",
    "test_weight_faults.py::test_an_engine_that_restarts_meets_the_trainer_again",
    "test_plugin.py::test_a_hang_ends_at_the_deadline_with_the_stacks",
    "test_after_faults.py::test_a_new_world_after[a timeout]",
    "test_rendezvous.py::test_ranks_that_disagree_about_the_size_all_fail",
    "test_backend_faults.py::test_backward_raises_when_a_rank_dies[in the first step-ddp]",
    "test_rendezvous.py::test_noise_at_the_door_is_ignored[and goes-no text]",
    "test_weights_without_a_store.py::test_what_needs_the_store_ends_in_time[stopped]",
    "test_grow.py::test_a_member_that_dies_while_newcomers_are_awaited[0]",
    "test_plugin.py::test_a_process_group_of_torch",
)
"""The longest tests, of which `make test` runs a shorter sibling; `make test-slow` runs them,
too."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(name in item.nodeid for name in LEFT_TO_TEST_SLOW):
            item.add_marker(pytest.mark.slow)


def pytest_sessionstart() -> None:
    _let_torch_s_loggers_propagate()  # on a rank, which has torch from the start


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    gc.disable()  # collecting creates thousands of tests, none of them garbage
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    _let_torch_s_loggers_propagate()
    _preload_modules_of_jobs(session)
    gc.collect()
    gc.freeze()  # modules and tests stay, so the garbage collector need not look at them


def _preload_modules_of_jobs(session: pytest.Session) -> None:
    """What runs on ranks of a RankPool is defined in the tests' modules, so no rank needs to load
    them itself."""
    for item in session.items:
        if {"pool", "fresh_pool"}.intersection(getattr(item, "fixturenames", ())):
            from ranks import preload

            preload(item.module.__name__)  # type: ignore[attr-defined]


def _let_torch_s_loggers_propagate() -> None:
    """pytest attaches its handlers to every logger that does not propagate, six times per test on
    each rank. torch has dozens of these, each with the same handler: that was a third of the cost
    of an empty test. So only the outermost one keeps its handler and shows what all log."""
    for name, logger in logging.root.manager.loggerDict.items():
        if not isinstance(logger, logging.Logger) or not name.startswith("torch."):
            continue
        if logger.handlers and "__" not in name:
            logger.propagate = True
            logger.handlers.clear()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """If workers of pytest-xdist run tests in parallel, a test marked `alone` waits until the
    others are between two tests, and they wait for it. A rank that still has a group after its test
    cannot run the next one, and says so."""
    config = item.config
    if config.pluginmanager.has_plugin("unisono-rank"):
        before = _open_groups()
        try:
            return (yield)
        finally:
            _await_that_groups_are_closed(before)
    if not hasattr(config, "workerinput"):
        return (yield)
    folder = config._tmp_path_factory.getbasetemp().parent  # type: ignore[attr-defined]
    how = fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH
    with open(folder / "door", "w") as door, open(folder / "room", "w") as room:
        fcntl.flock(door, fcntl.LOCK_EX)  # they queue behind it, so that none waits forever
        fcntl.flock(room, how)
        fcntl.flock(door, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:
            fcntl.flock(room, fcntl.LOCK_UN)  # also in children that have inherited it


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Warm ranks, for tests that leave their process as they found it."""
    from ranks import RankPool

    with RankPool() as warm:
        yield warm


@pytest.fixture
def fresh_pool() -> Iterator[RankPool]:
    """Ranks for this test only: it may kill, fork or confuse them."""
    from ranks import RankPool

    with RankPool() as own:
        yield own


@pytest.fixture(scope="module")
def cuda_pool() -> Iterator[RankPool]:
    """Ranks that keep the replaced driver of CUDA from test to test."""
    from ranks import RankPool

    with RankPool(3) as own:
        yield own


@pytest.fixture
def memory_folder() -> Iterator[str]:
    """The folder in which the replaced driver keeps its GPU's memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="u") as folder:
        yield folder


@pytest.fixture
def program(tmp_path: Path) -> Iterator[WriteProgram]:
    """Writes a program down in the folder of this test."""
    written: list[Program] = []

    def write(text: str, name: str = "program.py") -> Program:
        written.append(write_program(tmp_path, text, name))
        return written[-1]

    yield write
    for one in written:
        one.end()


@pytest.fixture(scope="session", autouse=True)
def _nothing_stays_in_shared_memory() -> Iterator[None]:
    before = _our_shared_files()
    yield
    assert _our_shared_files() <= before


@pytest.fixture(autouse=True)
def _watched_if_asked() -> Iterator[None]:
    """In a watched run (make test-watched) every test is watched, here and on ranks."""
    if os.environ.get("UNISONO_WATCH") != "1":
        yield
        return
    from unisono import watch

    assert watch.is_on()
    yield
    if not watch.is_on():
        watch.start()


@pytest.fixture(autouse=True)
def _only_our_algorithms() -> Iterator[None]:
    """Remove what a test has added to the catalog of algorithms."""
    yield
    catalog = sys.modules.get("unisono.plan.catalog")
    for key, entry in list(catalog._registered.items()) if catalog else ():
        if not (entry.make.__module__ or "").startswith(
            "unisono."
        ):  # None: an example of a docstring
            del catalog._registered[key]


def _open_groups() -> set[tuple[int, int]]:
    from unisono.comm.shared_memory import record_reader

    found = set()
    for path in record_reader.segments_of(os.getpid()):  # CUDA has unnamed files, too
        with contextlib.suppress(OSError, record_reader.NotASegment), open(path, "rb") as file:
            record_reader.map_segment(file.fileno())
            found.add(record_reader.segment_key(file.fileno()))
    return found


def _await_that_groups_are_closed(before: set[tuple[int, int]]) -> None:
    """Threads may still be leaving a group, reference cycles may have kept one until the test's
    arguments were dropped, and works that were never waited for keep one until the next check."""
    from unisono.comm.engine import end_abandoned_groups

    end_s = time.monotonic() + 60.0
    while left := _open_groups() - before:
        gc.collect()
        end_abandoned_groups()
        assert time.monotonic() < end_s, f"this test has left groups open: {_describe(left)}"
        time.sleep(0.01)


def _describe(segments: set[tuple[int, int]]) -> str:
    from unisono.comm.shared_memory.record_reader import read_process

    groups = [group for group in read_process(os.getpid(), 1) if group.segment in segments]
    return ", ".join(f"{group.name} of {group.size} ranks ({group.backend})" for group in groups)


def _our_shared_files() -> set[str]:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return set()
    return {path.name for path in folder.iterdir() if "unisono" in path.name}
