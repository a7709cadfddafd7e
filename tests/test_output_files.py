"""A FIFO among the files that a user names for output: an error if no process reads it."""

from __future__ import annotations

import json
import os
import select
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess
from typing import BinaryIO

import pytest

from ranks import raised
from unisono.variables import UCX
from unisono.watch.report import Report
from unisono.watch.traces import Trace
from user_programs import run_python

REFUSAL = "it is a FIFO that no process reads: start its reader, or name a file"


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "fifo.svg"
    os.mkfifo(path)
    return path


@pytest.fixture
def hello(tmp_path: Path) -> Path:
    path = tmp_path / "hello.py"
    path.write_text("print('hello')")
    return path


def start(*words: str | Path) -> CompletedProcess[str]:
    return run_python("-m", "unisono", *words)


@pytest.mark.parametrize(
    "command",
    [
        "run -n 1 --trace FILE PROGRAM",
        "bench -n 2 --json FILE --sizes 8",
        "bench -n 2 --plot FILE --sizes 8,16",
        "demo --report FILE",
        "plan show ring -n 2 -o FILE",
        "plan all_reduce -n 2 --sizes 8:16 -o FILE",
    ],
)
def test_a_fifo_without_a_reader_is_refused(fifo: Path, hello: Path, command: str) -> None:
    replaced = command.replace("FILE", str(fifo)).replace("PROGRAM", str(hello))
    done = start(*replaced.split())
    assert done.returncode != 0
    assert REFUSAL in done.stderr
    assert fifo.name in done.stderr
    assert "hello" not in done.stdout


def test_a_log_file_without_a_reader_is_refused(tmp_path: Path, hello: Path) -> None:
    log = tmp_path / "logs/1/stderr.log"
    log.parent.mkdir(parents=True)
    os.mkfifo(log)
    done = start("run", "-n", "2", "--log-dir", tmp_path / "logs", hello)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"--log-dir: cannot write {log}: {REFUSAL}" in done.stderr


def test_an_empty_log_folder_is_not_the_current_one(hello: Path) -> None:
    done = start("run", "-n", "1", "--log-dir", "", hello)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--log-dir is empty: name a folder, or leave it out" in done.stderr


def test_reports_and_traces_raise(fifo: Path) -> None:
    report = Report("lost", "rank 1 has ended", "world", "gloo", "barrier", 2, (1,))
    for write in (lambda: report.save(fifo), Trace(fifo).write):
        assert REFUSAL in str(raised(OSError, write))


def test_a_fifo_is_no_library(fifo: Path) -> None:
    """To load it would wait for a process that writes."""
    assert UCX.problem(str(fifo)).startswith("must be the path of a libucp.so")


def test_a_fifo_with_a_reader_gets_all(fifo: Path, hello: Path) -> None:
    """The check before the run does not end its reader."""
    descriptor = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    with open(descriptor, "rb") as reader, ThreadPoolExecutor(1) as threads:
        text = threads.submit(read_to_the_end, reader)
        done = start("run", "-n", "1", "--trace", fifo, hello)
        assert done.returncode == 0, done.stderr
        assert json.loads(text.result())["traceEvents"] == []


def read_to_the_end(reader: BinaryIO) -> bytes:
    events = select.poll()
    events.register(reader)
    events.poll()  # until a process writes, or closes it again
    os.set_blocking(reader.fileno(), True)
    return reader.read()
