"""Without torch: what needs it says so in one sentence, the rest works."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from user_programs import run_python

WITHOUT = """
import sys
from importlib.machinery import PathFinder


class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] == "torch" else super().find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Without
"""
SENTENCE = "needs torch, which is not installed: run `pip install torch`"


@pytest.fixture
def no_torch(tmp_path: Path) -> dict[str, str]:
    """An environment whose interpreters, and their children, find everything but torch."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    return {"PYTHONPATH": str(tmp_path)}


def test_functions_say_what_they_need(no_torch: dict[str, str]) -> None:
    code = """
import unisono
def attempt(what):
    try:
        what()
    except unisono.UnisonoError as error:
        assert isinstance(error, ModuleNotFoundError) and error.name == "torch"
        print(error)
def training():
    import unisono.training
attempt(lambda: unisono.all_reduce)
attempt(lambda: unisono.differentiable)
attempt(lambda: unisono.math)
attempt(unisono.get_device)
attempt(unisono.self_test)
attempt(lambda: unisono.init("gloo"))
attempt(lambda: unisono.init("nccl"))
attempt(lambda: unisono.init(with_torch=True))
attempt(training)
"""
    done = run_python("-c", code, environment=no_torch)
    assert done.returncode == 0, done.stderr
    named = [line.partition(" needs torch")[0] for line in done.stdout.splitlines()]
    assert named == [
        "unisono.all_reduce",
        "unisono.differentiable",
        "unisono.math",
        "unisono.get_device",
        "unisono.self_test",
        "the backend gloo",
        "the backend nccl",
        "torch's default process group (with_torch=True)",
        "unisono.training",
    ]
    assert done.stdout.count(SENTENCE) == len(named)


def test_plans_ranks_and_arrays_work_without(no_torch: dict[str, str]) -> None:
    code = """
import sys, unisono
def work():
    import numpy
    comm = unisono.init()
    array = numpy.ones(2) * comm.rank
    comm.all_reduce(array)
    return array.tolist()
print(unisono.launch(work, 2), "torch" in sys.modules)
"""
    done = run_python("-c", code, environment=no_torch)
    assert done.stdout == "[[1.0, 1.0], [1.0, 1.0]] False\n", done.stderr
    planned = run_python("-m", "unisono", "plan", "all_reduce", "-n", "4", environment=no_torch)
    assert planned.returncode == 0, planned.stderr


@pytest.mark.parametrize(
    "command",
    [
        ["demo", "--report", os.devnull],
        ["bench", "all_reduce"],
        ["run", "-n", "2", "--backend", "gloo", __file__],
    ],
)
def test_commands_say_what_they_need(command: list[str], no_torch: dict[str, str]) -> None:
    done = run_python("-m", "unisono", *command, environment=no_torch)
    assert done.returncode != 0
    assert SENTENCE in done.stderr
    assert "Traceback" not in done.stderr


def test_the_doctor_reports_it(no_torch: dict[str, str]) -> None:
    done = run_python("-m", "unisono", "doctor", "--backends", "unisono", environment=no_torch)
    assert done.returncode == 1
    assert done.stderr == ""
    assert "Run `pip install torch`." in done.stdout
