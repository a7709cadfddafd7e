"""`unisono top` in a terminal: what it omits in a narrow one, and which rank is to blame."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from unisono.cli import main
from unisono.show.table import name_of
from unisono.watch.command import COLUMNS, render
from unisono.watch.report import RankReport, Report
from unisono.watch.top import Job, RankRow, as_reported, jobs
from user_programs import WriteProgram

_CODE = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]")


def rows(count: int, groups: int = 1) -> list[RankRow]:
    return [
        RankRow(
            group=f"group {group}", backend="unisono", rank=rank, global_rank=rank,
            pid=1_000_000 + rank, state="is asleep", call="reduce_scatter #123456", call_s=12.3,
            site="train_with_a_long_name.py:1234", calls=1_234_567, calls_a_second=23_456.0,
            bytes_a_second=1.25e9, wait_share=0.75, lag_s=0.0123, is_stuck=False,
            is_culprit=rank == 1,
        )
        for group in range(groups)
        for rank in range(count)
    ]  # fmt: skip


def lines(width: int, job: Job) -> list[str]:
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(render([job], width))
    return [line.rstrip() for line in console.export_text().splitlines()]


@pytest.mark.parametrize("width", [60, 80, 100, 132, 200])
@pytest.mark.parametrize("groups", [1, 2])
def test_figures_are_whole_or_left_out(width: int, groups: int) -> None:
    several = rows(2, groups)
    text = lines(width, Job("train.py", (1, 2), tuple(several)))
    assert max(map(len, text)) <= width
    shown = [name.strip() for name in re.split("[│┃]", next(x for x in text if x[0] == "┃"))][2:-1]
    assert {"rank", "in", "for", "at"} <= set(shown)
    if width == 200:
        left_out = {"host"} | ({"group"} if groups == 1 else set())
        assert shown == [
            name_of(column.heading) for column in COLUMNS if name_of(column.heading) not in left_out
        ]
    cells = [re.split("│", line)[2:-1] for line in text if line.startswith("│")]
    first = [found for found in cells if found[shown.index("rank")].strip()]  # words go on below
    for row, found in zip(several, first, strict=True):
        for name, cell in zip(shown, found, strict=True):
            column = next(column for column in COLUMNS if name_of(column.heading) == name)
            if column.heading.startswith(("<", ">")):
                assert cell.strip() == column.show(row)
            else:
                assert column.show(row).startswith(cell.strip())


def test_the_culprit_has_a_mark_and_the_verdict_is_shown() -> None:
    job = Job("train.py", (1, 2), tuple(rows(3)), "rank 1 never reached it")
    text = lines(120, job)
    assert "rank 1 never reached it" in text
    assert [line[2] for line in text if line.startswith("│")] == [" ", "!", " "]


def test_a_report_says_where_the_ranks_of_its_group_are() -> None:
    ranks = (
        RankReport(0, 0, 1_000_000, True, place="train.py:88 in step"),
        RankReport(1, 1, 1_000_001, False, place="data.py:41 in load"),
    )
    report = Report("hang", "", "group 1", "unisono", "all_reduce", 4, (1,), ranks=ranks)
    without_lines = [replace(row, site="", is_culprit=False) for row in rows(2, groups=2)]
    shown = [as_reported(row, report) for row in without_lines]
    assert [(row.site, row.is_culprit) for row in shown] == [
        *(("", False), ("", False)),
        *(("train.py:88", False), ("data.py:41", True)),
    ]
    noted = as_reported(replace(without_lines[2], site="noted.py:1"), report)
    assert noted.site == "noted.py:1"


def test_a_wrong_pid_is_told_so() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    done = CliRunner().invoke(main, ["top", "--once", str(gone.pid)])
    assert (done.exit_code, done.output) == (2, f"Error: there is no process {gone.pid}\n")
    with subprocess.Popen(["sleep", "60"]) as other:
        done = CliRunner().invoke(main, ["top", "--json", str(other.pid)])
        other.kill()
    assert done.exit_code == 2
    assert f"process {other.pid} (sleep 60) is neither a rank nor a launcher" in done.output


def test_a_job_is_named_by_a_process_that_lives(tmp_path: Path) -> None:
    """Not by rank 0, which has died; and by the process's own command if no launcher started it."""
    code = "import time, unisono\nunisono.init(rank={}, size=2, rendezvous={!r})\nprint()\n"
    script, meeting = tmp_path / "train.py", str(tmp_path / "meeting")
    script.write_text(code.format(0, meeting) + "time.sleep(600)")
    command = [sys.executable, "-c", code.format(1, meeting) + "time.sleep(600)"]
    with (
        subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE) as first,
        subprocess.Popen(command, stdout=subprocess.PIPE) as second,
    ):
        assert first.stdout is not None
        assert second.stdout is not None
        first.stdout.readline()
        second.stdout.readline()
        assert [job.command for job in jobs(second.pid)] == ["train.py"]
        first.kill()
        first.wait()
        (after,) = jobs(second.pid)
        second.kill()
    assert after.command.startswith("-c import time, unisono unisono.init(rank=1, size=2")


class Terminal:
    """A terminal of 80 columns in which `unisono top` runs, and what it has shown so far."""

    def __init__(self, pid: int, lines: int) -> None:
        self.shown = b""
        self._pid, self._end = pty.fork()
        if self._pid == 0:
            # readline has set LINES where only C code sees it
            environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
            command = [sys.executable, "-m", "unisono", "top", str(pid)]
            os.execve(sys.executable, command, environment | {"TERM": "xterm"})
        size = struct.pack("HHHH", lines, 80, 0, 0)
        fcntl.ioctl(self._end, termios.TIOCSWINSZ, size)

    def until(self, words: str, seconds: float = 60) -> str:
        """What is shown from now on, until the words appear."""
        end = time.monotonic() + seconds
        self.shown = b""
        while words not in self.text():
            assert time.monotonic() < end, self.text()
            if select.select([self._end], [], [], 1)[0]:
                self.shown += os.read(self._end, 1 << 16)
        return self.text()

    def text(self) -> str:
        return _CODE.sub(b"", self.shown).decode(errors="replace")

    def interrupt(self) -> None:
        os.write(self._end, b"\x03")  # Ctrl-C

    def wait(self) -> int:
        with contextlib.suppress(OSError):  # the other end is closed
            while os.read(self._end, 1 << 16):
                pass
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


@pytest.fixture
def stuck_job(tmp_path: Path, program: WriteProgram) -> Iterator[int]:
    """The launcher of six ranks, one of which does not arrive until the test is over."""
    script = program("""
        import numpy, os, time, unisono
        comm = unisono.init()
        if comm.rank == 4:
            open("here", "w").close()
            while os.path.exists("wait"):
                time.sleep(0.05)
        comm.all_reduce(numpy.ones(3))
    """)
    (tmp_path / "wait").touch()
    job = script.start(before=("-m", "unisono", "run", "-n", "6", "--watch"))
    try:
        end = time.monotonic() + 60
        while not (tmp_path / "here").exists():
            assert time.monotonic() < end
            assert job.poll() is None
            time.sleep(0.02)
        yield job.pid
    finally:
        (tmp_path / "wait").unlink()
        try:
            job.wait(60)
        finally:
            job.kill()


@pytest.mark.provokes
@pytest.mark.slow
def test_a_terminal_of_80_columns_shows_who_is_to_blame(stuck_job: int) -> None:
    terminal = Terminal(stuck_job, 24)
    text = terminal.until("rank 4 never reached all_reduce #1 of group world")
    assert "program.py" in text
    terminal.until("│ ! │ 4 ")
    terminal.interrupt()
    assert terminal.wait() == 0
