"""The course's exercises: the solutions solve them, the exercises as they are handed out do not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from docs.blocks import ROOT
from ranks import RankPool
from unisono.launcher import functions
from unisono.learn.checks import CHECKS
from unisono.learn.command import learn

SOLUTIONS = ROOT / "examples" / "course"
NUMBERS = range(1, len(CHECKS) + 1)
HANDED_OUT = {6: "DeadlockError", 7: "under way", 12: "CollectiveMismatch"}
"""Exercises that are programs with a bug, and what their check says about it."""


def run(*words: object) -> Result:
    return CliRunner().invoke(learn, [str(word) for word in words])


def launch_warm(*args: Any, **options: Any) -> Any:
    """As launch, but the ranks need not import torch."""
    with RankPool() as ranks:
        return ranks.launch(*args, **options)


def test_lists_the_chapters_of_the_site() -> None:
    pages = sorted((ROOT / "docs").glob("course-*.md"))
    titles = [page.read_text().partition("\n")[0].removeprefix("# ") for page in pages]
    listed = run()
    assert listed.exit_code == 0
    assert listed.output.splitlines()[: len(CHECKS)] == titles


def test_start_keeps_what_the_reader_has_written(tmp_path: Path) -> None:
    own = tmp_path / "chapter_03.py"
    own.write_text("my own\n")
    begun = run("start", "--folder", tmp_path)
    assert begun.exit_code == 0
    assert f"{len(NUMBERS) - 1} exercises copied into {tmp_path}; 1 kept;" in begun.output
    assert own.read_text() == "my own\n"


def test_start_says_what_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    begun = run("start", "--folder", tmp_path / "file" / "course")
    assert begun.exit_code == 1
    assert f"Error: cannot write {tmp_path}/file/course: Not a directory" in begun.output


def test_check_without_a_copy_says_what_to_do(tmp_path: Path) -> None:
    checked = run("check", 1, "--folder", tmp_path)
    assert checked.exit_code == 1
    assert f"run `unisono learn start --folder {tmp_path}` first" in checked.output


def test_check_refuses_a_chapter_that_does_not_exist(tmp_path: Path) -> None:
    checked = run("check", len(NUMBERS) + 1, "--folder", tmp_path)
    assert checked.exit_code == 2
    assert "13 is not in the range 1<=x<=12" in checked.output


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("def my_share(items\n", "SyntaxError: '(' was never closed (chapter_01.py, line 1)"),
        ("", "chapter_01.py does not define my_share"),
        ("def my_share(items, rank, size):\n    return items / size\n", "(chapter_01.py, line 2)"),
        ("raise SystemExit(0)\n", "SystemExit: 0 (chapter_01.py, line 1)"),
    ],
)
def test_a_file_that_cannot_run_is_told_where(written: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "chapter_01.py").write_text(written)
    checked = run("check", 1, "--folder", tmp_path)
    assert checked.exit_code == 1
    assert f"{said}\nhint: " in checked.output


def test_wrong_solutions_are_told_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "chapter_01.py").write_text(
        "def my_share(items, rank, size):\n    return items[rank::size]\n"
    )
    checked = run("check", 1, "--folder", tmp_path)
    assert checked.exit_code == 1
    assert "[0, 4, 1, 5, 2, 6, 3, 7]" in checked.output
    assert "hint: " in checked.output


@pytest.mark.docs
def test_what_the_reader_prints_is_shown(tmp_path: Path) -> None:
    (tmp_path / "chapter_06.py").write_text(
        "def swap(comm, x):\n    print(x[:2].tolist())\n    return 1 / 0\n"
    )
    checked = run("check", 6, "--folder", tmp_path)
    assert checked.exit_code == 1
    assert "[rank 0] [0.0, 0.0]\n" in checked.output
    assert "ZeroDivisionError: division by zero (chapter_06.py, line 3)\n" in checked.output


@pytest.mark.docs
@pytest.mark.parametrize("number", NUMBERS)
def test_solutions(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "launch", launch_warm)
    checked = run("check", number, "--folder", SOLUTIONS)
    assert checked.exit_code == 0, checked.output


@pytest.mark.docs
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.provokes
def test_exercises_are_not_solved_yet(number: int, tmp_path: Path) -> None:
    run("start", "--folder", tmp_path)
    checked = run("check", number, "--folder", tmp_path)
    assert checked.exit_code == 1
    assert HANDED_OUT.get(number, "not written yet") in checked.output


@pytest.mark.docs
def test_a_ring_that_sends_too_much_is_counted(tmp_path: Path) -> None:
    shutil.copytree(SOLUTIONS, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chapter_03.py").write_text(
        "import torch\n"
        "def ring_all_reduce(comm, x):\n"
        "    total, passing = x.clone(), x.clone()\n"
        "    for _ in range(comm.size - 1):\n"
        "        work = comm.isend(passing.clone(), comm.next)\n"
        "        comm.recv(passing, comm.prev)\n"
        "        work.wait()\n"
        "        total += passing\n"
        "    x.copy_(total)\n"
    )
    checked = run("check", 3, "--folder", tmp_path)
    assert checked.exit_code == 1
    assert "are enough" in checked.output
