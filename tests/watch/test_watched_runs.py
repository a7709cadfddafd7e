"""Watched test runs: ranks are watched, reports are saved, and an unprovoked one is reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from unisono import UnisonoError, watch

pytest_plugins = ["pytester"]


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A watched project in which one test waits without the mark, one with it, and one not at
    all."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("UNISONO_WATCH", "1")
    monkeypatch.setenv("UNISONO_WATCH_HANG_S", "0.2")
    monkeypatch.setenv("UNISONO_WATCH_FOLDER", "reports")
    pytester.makeini("[pytest]\nmarkers = provokes")
    pytester.makeconftest(f"""
        import sys
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parents[1])!r})
        from alarms import Alarms

        def pytest_configure(config):
            if not hasattr(config, "workerinput"):
                config.pluginmanager.register(Alarms(Path("reports")))
    """)
    pytester.makepyfile("""
        import numpy, pytest, time
        from pathlib import Path
        from unisono import watch

        REPORTS = Path("reports").absolute()

        def late(comm):
            while comm.rank == 0 and not list(REPORTS.glob("seen-hang-*")):
                time.sleep(0.01)
            comm.all_reduce(numpy.ones(3))

        @pytest.mark.ranks(2)
        def test_quick(comm):
            assert watch.is_on()

        @pytest.mark.ranks(2)
        def test_slow(comm):
            late(comm)

        @pytest.mark.ranks(2)
        @pytest.mark.provokes
        def test_slow_on_purpose(comm):
            late(comm)
    """)
    return pytester


def test_a_report_that_nobody_provoked_fails_the_run(project: pytest.Pytester) -> None:
    done = project.runpytest_subprocess("-p", "no:hypothesispytest", "-k", "not purpose")
    done.assert_outcomes(passed=2)
    assert done.ret == pytest.ExitCode.TESTS_FAILED
    text = done.stdout.str()
    assert "test_slow: hang: rank 0 never reached all_reduce #1 of group world" in text
    assert "watched: 2 tests; 1 false alarm" in text


def test_one_that_was_provoked_does_not(project: pytest.Pytester) -> None:
    done = project.runpytest_subprocess("-p", "no:hypothesispytest", "-k", "quick or purpose")
    done.assert_outcomes(passed=2)
    assert done.ret == pytest.ExitCode.OK
    assert "watched: 2 tests; 0 false alarms; 1 report" in done.stdout.str()
    (saved,) = (project.path / "reports").iterdir()
    report = watch.load(saved)
    assert (report.kind, report.culprits, report.call) == ("hang", (0,), 1)


def test_a_folder_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("UNISONO_WATCH_FOLDER", str(tmp_path / "file"))
    before = watch.is_on()
    with pytest.raises(UnisonoError, match="must be a folder"):
        watch.start()
    assert watch.is_on() == before
