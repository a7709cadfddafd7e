"""`unisono secret`, and who reads what it writes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from unisono import variables
from unisono.comm.meeting.board import Board, FileBoard
from unisono.errors import UnisonoError
from user_programs import plain_environment

_dist: Any = dist
NAMES = ("UNISONO_JOB_SECRET", "UNISONO_JOB_SECRET_FILE", "UNISONO_REQUIRE_SECRET")


@pytest.fixture(autouse=True)
def _no_secret_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def make(file: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "unisono", "secret", file.name],
        cwd=file.parent,
        env=plain_environment(),
        umask=0,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_line_that_it_prints_is_what_ranks_need(tmp_path: Path) -> None:
    file = tmp_path / "my secret"
    made = make(file)
    assert made.stdout == f"export UNISONO_JOB_SECRET_FILE='{file}'\n", made.stderr
    assert file.stat().st_mode & 0o777 == 0o600
    shell = subprocess.run(
        ["sh", "-c", f"{made.stdout}exec printenv UNISONO_JOB_SECRET_FILE"],
        capture_output=True,
        text=True,
        check=True,
    )
    read = variables.JOB_SECRET_FILE.read({"UNISONO_JOB_SECRET_FILE": shell.stdout.strip()})
    assert read is not None
    assert read.decode() == file.read_text().strip()
    assert len(read) == 64


def test_an_existing_file_stays_as_it_is(tmp_path: Path) -> None:
    file, link = tmp_path / "secret", tmp_path / "link"
    file.write_text("mine")
    link.symlink_to(tmp_path / "elsewhere")
    for there in (file, link):
        refused = make(there)
        assert refused.returncode == 1
        assert f"{there.name} exists, and stays as it is" in refused.stderr
    assert file.read_text() == "mine"
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        ("s" * 32, 0o640, "must be this user's own file, which nobody else can read (chmod 600)"),
        ("s" * 32, 0o602, "must be this user's own file, which nobody else can read (chmod 600)"),
        ("short", 0o600, "must be a file with a secret, which must have 16 characters or more"),
        ("", 0o600, "must be a file with a secret, which must have 16 characters or more"),
    ],
)
def test_a_file_that_is_no_secret_is_refused(
    tmp_path: Path, text: str, mode: int, why: str
) -> None:
    file = tmp_path / "secret"
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(UnisonoError) as refused:
        variables.JOB_SECRET_FILE.read({"UNISONO_JOB_SECRET_FILE": str(file)})
    assert str(refused.value).startswith(f"UNISONO_JOB_SECRET_FILE {why}")
    assert "s" * 32 not in str(refused.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_users_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("s" * 32)
    file.chmod(0o600)
    os.chown(file, 65534, 65534)
    assert "this user's own file" in variables.JOB_SECRET_FILE.problem(str(file))


def test_a_job_that_requires_a_secret_does_not_start_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNISONO_REQUIRE_SECRET", "1")
    with pytest.raises(UnisonoError, match="this rank has no secret: `unisono secret FILE` makes"):
        Board(_dist.HashStore())
    FileBoard(tmp_path / "meeting")  # of this user: it needs none
    file = tmp_path / "secret"
    make(file)
    monkeypatch.setenv("UNISONO_JOB_SECRET_FILE", str(file))
    store = _dist.HashStore()
    Board(store).set("x", "hello")
    assert store.get("x") != b"hello"
    monkeypatch.delenv("UNISONO_JOB_SECRET_FILE")
    monkeypatch.setenv("UNISONO_JOB_SECRET", file.read_text().strip())
    assert Board(store).get("x") == "hello"
