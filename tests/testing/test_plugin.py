"""The pytest plugin: each test writes a small project and runs pytest in it, as a user would."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator

import pytest

from user_programs import eventually, ignoring, lives, run_python

pytest_plugins = ["pytester"]


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # so that the summary's lines are whole


def run(pytester: pytest.Pytester, *args: str) -> pytest.RunResult:
    return pytester.runpytest_subprocess("-p", "no:hypothesispytest", *args, timeout=180)


def notes_in(pytester: pytest.Pytester, name: str = "log") -> list[str]:
    """What tests have written to a file."""
    return (pytester.path / name).read_text().split()


@pytest.fixture
def notes(pytester: pytest.Pytester) -> None:
    """A module with which a project's tests write notes."""
    pytester.makepyfile(
        notes="""
        import os
        def note(word, name="log"):
            with open(name, "a") as file:
                file.write(f"{word}\\n")
        def where():
            return os.environ.get("UNISONO_RANK", "controller")
    """
    )


def test_the_plugin_costs_a_run_without_ranks_next_to_nothing() -> None:
    code = """
import sys, pytest
before = set(sys.modules)
import unisono.pytest_plugin
new = set(sys.modules) - before
assert not new & {"torch", "numpy", "multiprocessing"}, new
assert {name for name in new if "unisono" in name} == {"unisono", "unisono.pytest_plugin"}, new
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_ranks_share_a_world_and_each_test_has_its_own(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONWARNINGS", "error::DeprecationWarning")  # ranks start there, too
    pytester.makepyfile(
        test_world="""
        import gc, os, pathlib, sys, numpy, pytest, unisono
        from unisono.comm.shared_memory.exceptions import NEEDED_LATER
        from unisono.comm.shared_memory.record_reader import read_process

        def everyone(comm, value):
            all_values = numpy.zeros(comm.size, dtype=numpy.int64)
            comm.all_gather(all_values, numpy.array([value]))
            return all_values.tolist()

        @pytest.mark.ranks(2)
        def test_no_module_is_left_to_load_during_tests(comm):
            loaded = [vars(sys.modules[name]) for name in NEEDED_LATER]
            assert not any(known is names for known in gc.get_objects() for names in loaded)

        @pytest.mark.ranks(3)
        def test_processes(comm):
            assert everyone(comm, comm.rank) == [0, 1, 2]
            assert len(set(everyone(comm, os.getpid()))) == 3

        @pytest.mark.ranks([1, 2, 3])
        @pytest.mark.parametrize("factor", [2, 3])
        def test_repeated(comm, factor):
            assert everyone(comm, comm.size * factor) == [comm.size * factor] * comm.size

        @pytest.mark.ranks(2)
        class TestClass:
            def test_method(self, comm):
                assert comm.size == 2
                assert unisono.get_world() is comm and unisono.get_rank() == comm.rank

            @pytest.mark.ranks(1)
            def test_the_closest_mark_counts(self, comm):
                assert comm.size == 1

        @pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.ranks(2))])
        def test_mark_of_a_parameter(comm, size):
            assert comm.size == size

        @pytest.mark.ranks(2)
        @pytest.mark.filterwarnings("ignore::ResourceWarning")  # of the group in a cycle
        def test_init_finds_the_ranks(shared_tmp_path, tmp_path):
            comm = unisono.init()  # and leaves it open: the next test is not disturbed
            (shared_tmp_path / str(comm.rank)).write_text(str(tmp_path))
            comm.barrier()
            assert sorted(path.name for path in shared_tmp_path.iterdir()) == ["0", "1"]
            assert len({path.read_text() for path in shared_tmp_path.iterdir()}) == 2
            gc.disable()
            cycle = [comm.split([0, 1])]
            cycle.append(cycle)

        @pytest.mark.ranks(2)
        def test_no_group_is_left_and_no_port_open(comm):
            assert [group.name for group in read_process(os.getpid())] == [comm.name]
            sockets = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                       if os.path.islink(f"/proc/self/fd/{fd}")}
            for table in ("tcp", "tcp6", "udp", "udp6"):
                for line in pathlib.Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                    assert f"socket:[{line.split()[9]}]" not in sockets

        @pytest.mark.ranks(2)
        def test_collecting_garbage_after_a_test_takes_no_longer_for_many_tests(request):
            assert not any(known is request.node for known in gc.get_objects())

        def test_without_ranks():
            assert "UNISONO_RANK" not in os.environ
        """
    )
    result = run(pytester, "-v", "-W", "error", "-W", "ignore:Module already imported")
    result.assert_outcomes(passed=15)
    result.stdout.fnmatch_lines(["*::test_repeated[[]2ranks-3[]] PASSED*"])
    result.stdout.fnmatch_lines(["*::test_processes PASSED*"])
    left = {path.name for path in pytester.path.rglob("meeting-*")}
    assert not left


@pytest.fixture
def alone() -> Iterator[logging.Logger]:
    logger = logging.getLogger("a logger that does not propagate")
    logger.propagate = False
    yield logger
    logger.propagate = True


@pytest.mark.ranks(2)
@pytest.mark.parametrize("level", [logging.WARNING, logging.INFO])
def test_ranks_catch_logs_as_pytest_does(
    alone: logging.Logger, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Also the second time: no handler is left of the first."""
    with caplog.at_level(level), caplog.at_level(level, alone.name):
        for logger in (alone, logging.getLogger(), logging.getLogger("another")):
            logger.info("low")
            logger.warning("high")
            logger.handlers[:] = logger.handlers[::-1]  # as a program may
    expected = ["low", "high"] if level == logging.INFO else ["high"]
    assert caplog.messages == expected * 3
    assert len(alone.handlers) == len(set(alone.handlers)) == 2
    alone.handlers.clear()  # as torch does with its own


@pytest.mark.parametrize("wanted", [None, "0"])
def test_shapes_are_compared_unless_a_variable_forbids_it(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, wanted: str | None
) -> None:
    """In every test, also after one that has stopped the watch."""
    if wanted is not None:
        monkeypatch.setenv("UNISONO_CHECK_SHAPES", wanted)
    pytester.makepyfile("""
        import numpy, pytest, unisono

        @pytest.mark.ranks(2)
        @pytest.mark.parametrize("number", [1, 2])
        def test_shapes(comm, number):
            comm.all_reduce(numpy.ones((2, 3) if comm.rank else (3, 2)))

        @pytest.mark.ranks(2)
        def test_the_watch_stops(comm):
            unisono.watch.start()
            unisono.watch.stop()

        @pytest.mark.ranks(2)
        def test_shapes_again(comm):
            comm.all_reduce(numpy.ones((2, 3) if comm.rank else (3, 2)))
    """)
    result = run(pytester, "-p", "no:randomly")
    if wanted is None:
        result.assert_outcomes(failed=3, passed=1)
        result.stdout.fnmatch_lines(
            ["*rank 0: all_reduce of float64, 6 elements, sum, shape (3, 2)*"]
        )
    else:
        result.assert_outcomes(passed=4)


def test_failures_are_shown_once_for_all_ranks_that_had_them(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import logging, sys, pytest

        @pytest.mark.ranks(4)
        def test_fails(comm):
            print("said by all")
            print("to stderr by", comm.rank, file=sys.stderr)
            logging.warning("logged by %d", comm.rank)
            if comm.rank == 0:
                assert [1, 2] == [1, 3]
            comm.barrier()

        @pytest.fixture
        def broken():
            raise ValueError("no such thing")

        @pytest.mark.ranks(2)
        def test_setup(broken):
            pass

        @pytest.fixture
        def ends_badly():
            yield
            raise ValueError("at the end")

        @pytest.mark.ranks(2)
        def test_teardown(ends_badly):
            pass

        @pytest.mark.ranks(1)
        def test_alone(comm):
            assert comm.size == 7
    """)
    result = run(pytester, "--junitxml=report.xml", "--durations=3")
    result.assert_outcomes(failed=2, errors=2, passed=1)
    result.stdout.fnmatch_lines(
        [
            "*- all 2 ranks -*",
            "*ValueError: no such thing*",
            "*- rank 0 -*",
            "*At index 1 diff: 2 != 3*",  # a rewritten assertion
            "*- ranks 1-3, shown by rank 1 -*",
            "*PeerLost: rank 0 *",
            "*Captured stdout call (all 4 ranks)*",
            "said by all",
            "*Captured stderr call (rank 0)*",
            "to stderr by 0",
            "*Captured log call (rank 0)*",
            "*logged by 0*",
            "*Captured stderr call (rank 3)*",
            "to stderr by 3",
            "*assert 1 == 7*",
            "*::test_fails - rank 0: *assert [[]1, 2[]] == [[]1, 3[]]*",
            "*::test_setup - all 2 ranks: ValueError: no such thing*",
        ]
    )
    assert result.outlines.count("said by all") == 1
    result.stdout.fnmatch_lines(["*comm.barrier()", "*PeerLost: rank 0 *"])
    result.stdout.no_fnmatch_line("*unisono/comm/*")  # no frames of ours
    assert 'errors="2" failures="2"' in (pytester.path / "report.xml").read_text()


def test_skips_expected_failures_warnings_and_properties(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import warnings, pytest

        @pytest.mark.ranks(2)
        @pytest.mark.skip(reason="not today")
        def test_skip_mark(): pass

        @pytest.mark.ranks(2)
        def test_skip_call(comm):
            pytest.skip("nor tomorrow")

        @pytest.mark.ranks(2)
        def test_one_skips(comm):
            if comm.rank == 0:
                pytest.skip("only here")

        @pytest.mark.ranks(2)
        @pytest.mark.xfail(strict=True)
        def test_one_fails_as_expected(comm):
            assert comm.rank == 0

        @pytest.mark.ranks(2)
        @pytest.mark.xfail(strict=True, reason="it works")
        def test_all_pass_by_surprise(comm): pass

        @pytest.mark.ranks(2)
        @pytest.mark.xfail
        def test_may_fail(comm): pass

        @pytest.mark.ranks(2)
        def test_warns(comm, record_property):
            record_property("size", comm.size)
            record_property("rank", comm.rank)
            warnings.warn("be careful", DeprecationWarning)

        @pytest.mark.ranks(2)
        async def test_async(): pass
    """)
    result = run(pytester, "-rsxX", "--junitxml=report.xml")
    result.assert_outcomes(skipped=2, passed=2, xfailed=1, xpassed=1, failed=2)
    result.stdout.fnmatch_lines(["*not today*", "*nor tomorrow*"])
    result.stdout.fnmatch_lines(["*XPASS(strict)*it works*"])
    assert str(result.stdout).count("DeprecationWarning: be careful") == 1  # of both ranks
    result.stdout.fnmatch_lines(["*async def functions are not natively supported*"])
    report = (pytester.path / "report.xml").read_text()
    assert report.count('name="size" value="2"') == 1
    assert 'name="rank" value="0"' in report
    assert 'name="rank" value="1"' in report


@pytest.mark.usefixtures("notes")
def test_fixtures_live_as_long_as_their_scope_on_every_rank(pytester: pytest.Pytester) -> None:
    head = "import pytest\nfrom notes import note, where\n"

    def fixture(scope: str, name: str) -> str:
        return head + textwrap.dedent(f"""
            @pytest.fixture(scope="{scope}", autouse=True)
            def {name}():
                note(f"+{name}:{{where()}}")
                yield
                note(f"-{name}:{{where()}}")
        """)

    test_on_ranks = "@pytest.mark.ranks(2)\ndef test_ranks(): note(f'{}:{{where()}}')\n"
    test_a = """
@pytest.mark.ranks(2)
@pytest.mark.parametrize("i", range(3))
def test_ranks(i): note(f"a{i}:{where()}")
def test_here(): note(f"here:{where()}")
@pytest.mark.ranks(1)
def test_one(): note(f"one:{where()}")
"""
    pytester.makepyfile(
        **{
            "conftest": fixture("session", "whole"),
            "first/test_z": head + test_on_ranks.format("z"),
            "package/__init__": "",
            "package/conftest": fixture("package", "package"),
            "package/test_a": fixture("module", "a") + test_a,
            "package/test_b": fixture("module", "b") + test_on_ranks.format("b"),
            "test_c": head + "def test_last(): note(f'last:{where()}')",
        }
    )
    # pytest loads the conftest of every argument before ranks collect file by file
    run(pytester, "first", "package", "test_c.py").assert_outcomes(passed=8)
    log = notes_in(pytester)

    def of(where: str) -> list[str]:
        return [word.removesuffix(f":{where}") for word in log if word.endswith(f":{where}")]

    assert " ".join(of("0")) == "+whole z +package +a a0 a1 a2 one -a +b b -b -package -whole"
    assert " ".join(of("1")) == "+whole z +package +a a0 a1 a2 -a +b b -b -package -whole"
    assert " ".join(of("controller")) == "+whole +package +a here -a -package last -whole"


def test_fixtures_of_the_controller_end_with_the_last_test_of_their_scope(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile("""
        import pytest

        @pytest.fixture(scope="module")
        def ends_badly():
            yield
            raise ValueError("in the controller")

        def test_here(ends_badly): pass

        @pytest.mark.ranks(1)
        def test_last(): pass
    """)
    result = run(pytester)
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*ERROR at teardown of test_last*", "*in the controller*"])


@pytest.mark.usefixtures("notes")
def test_choosing_tests_and_stopping_early(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import pytest
        from notes import note
        @pytest.mark.ranks([1, 2])
        def test_one(comm):
            note(f"one:{comm.size}")
            assert comm.size == 1
        @pytest.mark.ranks(2)
        def test_two(comm):
            note("two")
            assert comm.rank == 5
    """)
    name = "test_choosing_tests_and_stopping_early.py"
    result = run(pytester, "--collect-only", "-q")
    result.stdout.fnmatch_lines([f"{name}::test_one[[]1ranks[]]", f"{name}::test_two"])
    assert not (pytester.path / "log").exists()
    run(pytester, "-x").assert_outcomes(passed=1, failed=1)
    assert Counter(notes_in(pytester)) == {"one:1": 1, "one:2": 2}
    run(pytester, "--lf", "--pdb").assert_outcomes(failed=1)
    assert Counter(notes_in(pytester)) == {"one:1": 1, "one:2": 4}
    run(pytester, "-k", "1ranks", "-p", "no:cacheprovider", "-p", "no:tmpdir").assert_outcomes(
        passed=1, deselected=2
    )
    result = run(pytester, f"{name}::test_one[1ranks]", "-s", "--setup-show")
    result.assert_outcomes(passed=1)
    assert Counter(notes_in(pytester)) == {"one:1": 3, "one:2": 4}
    result = run(pytester, "-p", "no:unisono", "-k", "test_two")
    result.stdout.fnmatch_lines(["*fixture 'comm' not found*"])


def test_what_makes_no_sense_is_said_in_one_sentence(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import unittest, pytest
        ranks = pytest.mark.ranks

        @ranks(0)
        def test_none(comm): pass
        @ranks("a")
        def test_word(comm): pass
        @ranks(True)
        def test_bool(comm): pass
        @ranks
        def test_bare(comm): pass
        @ranks()
        def test_empty(comm): pass
        @ranks([])
        def test_empty_list(comm): pass
        @ranks([2, -1])
        def test_negative(comm): pass
        @ranks(2, count=3)
        def test_keyword(comm): pass
        @ranks(2, timeout_s="soon")
        def test_timeout(comm): pass
        @ranks(2, backend=None)
        def test_backend(comm): pass
        @pytest.mark.parametrize("i", [pytest.param(1, marks=ranks([1, 2]))])
        def test_list_in_param(comm, i): pass
        @ranks(2)
        class TestCase(unittest.TestCase):
            def test_method(self): pass
        def test_no_mark(comm): pass
        def test_fine(): pass
    """)
    result = run(pytester, "--strict-markers")
    result.assert_outcomes(errors=13, passed=1)
    text = result.stdout.str()
    for sentence in (
        "needs at least 1 rank, not 0",
        "needs a whole number of ranks, not 'a'",
        "needs a whole number of ranks, not True",
        "needs the number of ranks: write @pytest.mark.ranks(4)",
        "got an empty list",
        "needs at least 1 rank, not -1",
        "has no argument count: it takes",
        "timeout_s of pytest.mark.ranks must be a positive number of seconds, not 'soon'",
        "backend of pytest.mark.ranks must be a name, not None",
        "works neither in pytest.param nor outside",
        "cannot run the tests of a unittest.TestCase",
        "the fixture comm needs ranks: mark the test with @pytest.mark.ranks(4)",
    ):
        assert sentence in text, sentence
    assert "Traceback" not in text
    assert "During handling" not in text


@pytest.mark.usefixtures("notes")
def test_a_rank_that_dies_is_named_and_replaced_alone(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import os, signal, pytest
        from notes import note
        def pids(comm, name):
            note(f"{comm.rank}:{os.getpid()}", name)
            comm.barrier()
        @pytest.mark.ranks(3)
        def test_before(comm): pids(comm, "before")
        @pytest.mark.ranks(3)
        def test_killed(comm):
            if comm.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            comm.barrier()
        @pytest.mark.ranks(3)
        def test_after(comm): pids(comm, "after")
        @pytest.mark.ranks(2)
        def test_exits(comm):
            if comm.rank == 0:
                os._exit(7)
        @pytest.mark.ranks(2)
        def test_interrupted(comm):
            if comm.rank == 1:
                raise KeyboardInterrupt
            comm.barrier()
        @pytest.mark.ranks(2)
        def test_at_last(comm): comm.barrier()
    """)
    result = run(pytester)
    result.assert_outcomes(passed=3, failed=3)
    result.stdout.fnmatch_lines(
        [
            "*- rank 1 -*",
            "the process was killed by SIGKILL",
            "*- rank* 0*-*",
            "*PeerLost: rank 1 *",
            "*- rank 0 -*",
            "the process exited with code 7",
            "*- rank 1 -*",
            "*KeyboardInterrupt*",
            "FAILED *::test_killed - rank 1: the process was killed by SIGKILL",
        ]
    )
    before, after = set(notes_in(pytester, "before")), set(notes_in(pytester, "after"))
    assert {word[0] for word in before & after} == {"0", "2"}
    assert not any(lives(int(word[2:])) for word in before | after)


def test_a_hang_ends_at_the_deadline_with_the_stacks(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nranks_timeout_s = 2.5")
    pytester.makepyfile("""
        import time, pytest

        def sleep_for_long():
            time.sleep(1000)

        @pytest.mark.ranks(2)
        def test_hangs(comm):
            if comm.rank == 1:
                sleep_for_long()
            comm.barrier()

        @pytest.mark.ranks(2)
        def test_next(comm): comm.barrier()

        @pytest.mark.ranks(2, timeout_s=1)
        def test_all_hang():
            sleep_for_long()

        @pytest.fixture
        def fails_on_one(request):
            from unisono.testing.assignment import ASSIGNMENT
            assert request.config.stash[ASSIGNMENT].rank

        @pytest.mark.ranks(2, timeout_s=3)
        def test_half_a_setup(fails_on_one, comm): pass
    """)
    result = run(pytester)
    result.assert_outcomes(passed=1, failed=2, errors=1)
    result.stdout.fnmatch_lines(
        [
            "*RendezvousError: group world: rank 0 did not join within 1.5 s",
            "*- rank 1 -*",
            "not done by the test's deadline of 2.5 s",
            "*thread * (most recent call first):",
            '  File "*", line 4 in sleep_for_long',
            '  File "*", line * in test_hangs',
            "*- rank 0 -*",
            "*CollectiveTimeout: barrier *rank 1 never arrived*",
            "*- all 2 ranks -*",
            "not done by the test's deadline of 1 s",
            '  File "*", line 4 in sleep_for_long',
        ]
    )
    assert "pluggy/" not in result.stdout.str()


def test_ranks_that_cannot_serve_say_why(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_collect="""
        import sys, pytest
        if "unisono.testing.rank" in sys.modules:
            raise ImportError("not in a rank")
        @pytest.mark.ranks(2)
        def test_collect(): pass
        """,
        test_ids="""
        import os, pytest
        @pytest.mark.ranks(2)
        @pytest.mark.parametrize("pid", [os.getpid()])
        def test_ids(pid): pass
        """,
        test_sends="""
        import pytest
        @pytest.mark.ranks(2)
        def test_sends(record_property):
            record_property("function", lambda: None)
        @pytest.mark.ranks(2)
        def test_good(comm): comm.barrier()
        """,
        test_stops="""
        import pytest
        @pytest.mark.ranks(2)
        def test_stops(comm): pytest.exit("enough", 11)
        def test_never(): pass
        """,
    )
    result = run(pytester, "--ignore=test_stops.py")
    result.assert_outcomes(passed=1, failed=2, errors=1)
    result.stdout.fnmatch_lines(
        [
            "*- all 2 ranks -*",
            "the file could not be collected",
            "*ImportError: not in a rank*",
            "this test was not found in its file",
            "the report cannot be sent",
        ]
    )
    result = run(pytester, "test_stops.py")
    assert result.ret == 11
    result.stdout.fnmatch_lines(["*_pytest.outcomes.Exit: enough*"])

    pytester.makeconftest("""
        import sys
        if "unisono.testing.rank" in sys.modules:
            raise RuntimeError("this conftest does not load")
    """)
    result = run(pytester, "test_ids.py")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["the process exited with code*", "*does not load*"])


def start_and_hang(pytester: pytest.Pytester) -> tuple[subprocess.Popen[bytes], list[int]]:
    pytester.makepyfile("""
        import os, subprocess, time, pytest
        @pytest.mark.ranks(2)
        def test_hangs():
            child = subprocess.Popen(["sleep", "1000"])
            with open("pids", "a") as file:
                file.write(f"{os.getpid()} {child.pid}\\n")
            time.sleep(1000)
    """)
    command = [sys.executable, "-m", "pytest", "-p", "no:hypothesispytest"]
    controller = subprocess.Popen(
        command, cwd=pytester.path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    pids = pytester.path / "pids"
    assert eventually(lambda: pids.exists() and pids.read_text().count("\n") == 2)
    return controller, [int(word) for word in pids.read_text().split()]


def test_an_interrupt_ends_all_at_once(pytester: pytest.Pytester) -> None:
    controller, pids = start_and_hang(pytester)
    controller.send_signal(signal.SIGINT)
    output, _ = controller.communicate(timeout=60)  # the test itself never ends
    assert controller.returncode == pytest.ExitCode.INTERRUPTED
    assert b"KeyboardInterrupt" in output
    assert eventually(lambda: not any(map(lives, pids)), 2)


def test_sigint_interrupts_what_this_suite_starts() -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_also_where_the_suite_was_started_with_sigint_ignored() -> None:
    """As a script's `make test &` does it."""
    that = f"{__file__}::{test_sigint_interrupts_what_this_suite_starts.__name__}"
    with ignoring(signal.SIGINT):
        done = run_python("-m", "pytest", "-q", that)
    assert done.returncode == 0, done.stdout


def test_ranks_do_not_survive_their_controller(pytester: pytest.Pytester) -> None:
    controller, pids = start_and_hang(pytester)
    controller.kill()
    controller.communicate()
    assert eventually(lambda: not any(lives(pid) for pid in pids[::2]), 5)
    for child in pids[1::2]:  # a test's own children are its own business
        os.kill(child, signal.SIGKILL)


@pytest.mark.usefixtures("notes")
def test_each_worker_of_xdist_has_its_own_ranks(pytester: pytest.Pytester) -> None:
    pytest.importorskip("xdist")
    pytester.makepyfile("""
        import os, warnings, pytest
        from notes import note
        @pytest.fixture(scope="session")
        def once():
            note("session")
        @pytest.mark.ranks(2)
        @pytest.mark.parametrize("i", range(6))
        def test_sum(comm, once, worker_id, i):
            comm.barrier()
            warnings.warn("be careful", FutureWarning)
            note(f"{worker_id}:{comm.rank}:{os.getpid()}")
        @pytest.mark.ranks(2)
        def test_fails(comm):
            assert comm.size == 3
    """)
    result = run(pytester, "-n2")
    result.assert_outcomes(passed=6, failed=1)
    result.stdout.fnmatch_lines(["*FutureWarning: be careful*"])
    result.stdout.fnmatch_lines(
        ["*- all 2 ranks, shown by rank 0 -*", "*assert 2 == 3*", "FAILED *all 2 ranks: *2 == 3"]
    )
    log = notes_in(pytester)
    processes = {word for word in log if word != "session"}
    assert {word.rpartition(":")[0] for word in processes} == {
        f"gw{worker}:{rank}" for worker in range(2) for rank in range(2)
    }
    assert len(processes) == 4 == log.count("session")


@pytest.mark.parametrize("options", [(), ("-n2",)], ids=["alone", "xdist"])
def test_coverage_has_what_only_ranks_run(
    pytester: pytest.Pytester, options: tuple[str, ...]
) -> None:
    pytest.importorskip("pytest_cov")
    pytester.makepyfile(
        code="""
        def parity(rank):
            if rank == 0:
                return "zero"
            if rank == 1:
                return "one"
            return "more"
        """
    )
    pytester.makepyfile("""
        import pytest
        from code import parity
        @pytest.mark.ranks(2)
        def test_parity(comm):
            assert parity(comm.rank)
    """)
    result = run(pytester, "--cov=code", "--cov-report=term-missing", *options)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["code.py * 6 * 1 * 83% * 6"])
    assert [path.name for path in pytester.path.glob(".coverage*")] == [".coverage"]


@pytest.mark.usefixtures("notes")
def test_a_worker_s_ranks_keep_nothing_of_a_test_that_is_over(pytester: pytest.Pytester) -> None:
    """It is unknown whether the worker will get another test for three ranks: their group and the
    test's own fixtures are torn down anyway, and what a whole file shares stays."""
    pytest.importorskip("xdist")
    pytester.makepyfile("""
        import os, pytest
        from notes import note, where
        from unisono.comm.shared_memory.record_reader import read_process
        @pytest.fixture(scope="module")
        def shared():
            note(f"+shared:{where()}")
            yield os.getpid()
        @pytest.fixture
        def own(shared):
            yield shared
            note(f"-own:{where()}")
        @pytest.mark.ranks(3)
        def test_on_ranks(comm, own):
            if comm.rank == 2:
                with open("pid", "w") as file:
                    file.write(str(os.getpid()))
        def test_here():
            with open("pid") as file:
                assert read_process(int(file.read())) == []
            note("looked")
        def test_last():
            pass
    """)
    run(pytester, "-n1").assert_outcomes(passed=3)
    log = notes_in(pytester)
    assert sorted(log[: log.index("looked")]) == [
        *(f"+shared:{rank}" for rank in range(3)),
        *(f"-own:{rank}" for rank in range(3)),
    ]


def test_a_process_group_of_torch(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import pytest, torch
        import torch.distributed as dist

        @pytest.mark.ranks(2)
        @pytest.mark.parametrize("i", range(2))
        def test_sum(process_group, i):
            assert dist.get_backend() == "unisono"
            tensor = torch.ones(3) * process_group.rank()
            dist.all_reduce(tensor)
            assert tensor.tolist() == [1, 1, 1]

        @pytest.mark.ranks(2)
        def test_nothing_is_left(comm):
            assert not dist.is_initialized()
            assert torch.get_num_threads() == 1

        @pytest.mark.ranks(2, backend="cpu:gloo")
        def test_backend(process_group):
            assert process_group.size() == 2
            dist.destroy_process_group()  # early is fine

        @pytest.mark.ranks(2, backend="pigeon")
        def test_unknown(process_group): pass
    """)
    result = run(pytester)
    result.assert_outcomes(passed=4, errors=1)
    result.stdout.fnmatch_lines(["pytest.mark.ranks: torch has no backend pigeon here*"])
    assert not re.findall("During handling", result.stdout.str())
