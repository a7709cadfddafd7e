"""Watched test runs: ranks are watched, reports are saved, and an unprovoked one is reported."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest

from unisono import UnisonoError, watch
from unisono.watch.journal import Journal
from unisono.watch.report import Report
from user_programs import WriteProgram, run_python

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


# -- where reports are, and what is shown of them --------------------------------------------------


@pytest.mark.parametrize("variable", ["UNISONO_WATCH", "UNISONO_SANITIZE", "UNISONO_PROFILE"])
def test_each_variable_alone_starts_the_watch_at_import_torch(variable: str) -> None:
    script = "import torch; from unisono import watch; print(watch.is_on())"
    done = run_python("-c", script, environment={variable: "1"})
    assert (done.stdout, done.stderr) == ("True\n", "")


LATE = """
    import os, pathlib, time
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    folder = pathlib.Path(os.environ["TMPDIR"])
    while rank and not list(folder.glob("unisono-reports-*/seen-hang-*")):
        time.sleep(0.01)
    dist.all_reduce(torch.ones(3))
    dist.barrier()
    dist.destroy_process_group()
    if {fails}:
        raise {error}("no luck")
"""


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
OURS = ("-m", "unisono", "run", "-n", "2")


@pytest.mark.provokes
@pytest.mark.parametrize(
    ("error", "before", "fails"),
    [
        pytest.param("", TORCHRUN, False, id="torchrun, ends well"),
        pytest.param("SystemExit", OURS, True, id="unisono run, fails"),
        pytest.param("LookupError", TORCHRUN, True, id="torchrun, fails", marks=pytest.mark.slow),
        pytest.param("", OURS, False, id="unisono run, ends well", marks=pytest.mark.slow),
    ],
)
def test_reports_have_a_folder_by_default_which_only_runs_that_fail_leave(
    program: WriteProgram, tmp_path: Path, error: str, before: tuple[str, ...], fails: bool
) -> None:
    here = tmp_path / "temporary"
    here.mkdir()
    script = program(LATE.format(fails=fails, error=error or "LookupError"))
    settings = {"UNISONO_WATCH": "1", "UNISONO_WATCH_HANG_S": "1", "UNISONO_WATCH_FOLDER": ""}
    done = script.run(before=before, environment=settings | {"TMPDIR": str(here)})
    assert (done.returncode != 0) == fails, done.stderr
    said = done.stderr.partition("unisono.watch: ")[2]
    assert re.match(r"rank [01] never reached ", said), done.stderr
    path = Path(re.findall("the full report: (.*json)", said)[0])
    assert path.parent.parent == here
    assert path.exists() == fails
    assert bool(list(here.glob("unisono-reports-*"))) == fails
    assert {file.name for file in tmp_path.iterdir()} == {"temporary", "program.py"}


MANY = Report(
    "mismatch", "rank 1 differs", "world", "gloo", details=tuple(f"line {n}" for n in range(30))
)


@pytest.mark.parametrize("terminal", ["0", "1"])
def test_a_live_report_is_short_on_a_terminal_and_whole_elsewhere(
    tmp_path: Path,
    terminal: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("UNISONO_TERMINAL", terminal)
    Journal(str(tmp_path)).tell(MANY)
    (path,) = tmp_path.iterdir()
    lines = caplog.messages[-1].splitlines()
    assert lines[:2] == ["unisono.watch: rank 1 differs", "  line 0"]
    assert lines[10].strip() == "line 9"
    assert lines[11].startswith("  Compare the calls named above")
    assert lines[12] == f"  the full report: {path}"
    assert lines[13:] == ([] if terminal == "1" else [f"  line {n}" for n in range(10, 30)])
    assert watch.load(path).details == MANY.details


def test_a_report_that_cannot_be_saved_is_shown_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where there is no folder for temporary files, Python's is the current one."""
    monkeypatch.setenv("UNISONO_TERMINAL", "1")
    monkeypatch.chdir(tmp_path)
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    Journal("").tell(MANY)
    assert "the full report could not be written" in caplog.messages[-1]
    assert "line 29" in caplog.messages[-1]
    assert not list(tmp_path.iterdir())
