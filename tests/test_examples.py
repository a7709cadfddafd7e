"""Every example, on 1, 2 and 4 ranks. They check themselves; these tests also check that they can
fail."""

from __future__ import annotations

import ast
import os
import pkgutil
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono
from user_programs import run_python

FOLDER = Path(__file__).parents[1] / "examples"
OWN_RANKS = {"replicas", "survive"}  # they start their ranks themselves
EXAMPLES = sorted({path.stem for path in FOLDER.glob("*.py")} - OWN_RANKS)


def run(name: str) -> None:
    """The example as a program of its own: `unisono.init()` finds the ranks of this test."""
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")


@pytest.mark.ranks([1, 2, 4])
@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(name)
    assert unisono.get_backend_reason() == "no world has started"  # it has cleaned up
    assert capsys.readouterr().out or os.environ["UNISONO_SIZE"] != "1"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", EXAMPLES)
def test_example_on_gloo(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_BACKEND", "gloo")
    run(name)


def test_ranks_are_killed_and_the_losses_stay_the_same() -> None:
    options = ("--kills", "2", "--every", "0.2", "--seconds", "500")
    ran = run_python(str(FOLDER / "survive.py"), *options, timeout_s=600)
    first, second, *_ = ran.stdout.splitlines()
    assert first == "  0.0 s  loading torch"
    assert second.endswith("s  starting 4 ranks")
    assert "2 ranks killed and replaced" in ran.stdout, ran


def test_lengths_are_those_of_the_readme() -> None:
    lengths = {p.stem: p.read_text().count("\n") for p in FOLDER.glob("*.py")}
    assert {name for name, lines in lengths.items() if lines >= 100} == OWN_RANKS
    for folder in ("parallel_gpt", "weight_update"):
        lines = sum(p.read_text().count("\n") for p in (FOLDER / folder).glob("*.py"))
        assert 300 < lines < 600


# -- they would notice -----------------------------------------------------------------------------


def off_by_one(result: Any) -> Any:
    """A wrong value in place of a function's result, of the same type."""
    if isinstance(result, torch.Tensor):
        if result.dtype is torch.bool:
            return ~result
        result.data += 1  # in place: some functions are called for their effect
        return result
    if isinstance(result, bool):
        return not result
    if isinstance(result, (int, float)):
        return result + 1
    if isinstance(result, str):
        return result + "!"
    if isinstance(result, dict):
        return {key: off_by_one(value) for key, value in result.items()}
    if isinstance(result, (list, tuple)):
        return type(result)(map(off_by_one, result))
    return result


SABOTAGE = {
    "batch_size": "unisono.all_reduce",
    "chain": "unisono.recv",
    "checkpoint": "torch.load",
    "composite_math": "unisono.math.softmax",
    "early_stop": "unisono.training.any_rank",
    "evaluation": "unisono.training.gather_in_order",
    "generation": "unisono.training.gather_in_order",
    "gradient_averaging": "unisono.all_reduce",
    "gradient_norms": "unisono.training.clip_grad_norm",
    "helper_functions": "unisono.reduce_tensor",
    "identity": "unisono.reduce_scatter",
    "learning_rate": "unisono.broadcast_object",
    "long_sequence": "unisono.training.ulysses_attention",
    "metrics": "unisono.training.mean_over_samples",
    "pipeline": "unisono.recv",
    "process_info": "unisono.gather_object",
    "scatter_or_broadcast": "unisono.scatter",
    "start_alike": "unisono.broadcast",
    "sync_interval": "unisono.training.mean_over_samples",
    "two_groups": "unisono.all_reduce",
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", sorted(SABOTAGE))
def test_an_example_notices_wrong_results(
    name: str, monkeypatch: pytest.MonkeyPatch, shared_tmp_path: Path
) -> None:
    function: Callable[..., Any] = pkgutil.resolve_name(SABOTAGE[name])
    monkeypatch.setattr(SABOTAGE[name], lambda *args, **kw: off_by_one(function(*args, **kw)))
    noticed = False
    try:
        run(name)
    except AssertionError:
        noticed = True
    except unisono.PeerLost:
        pass  # the other one has ended
    monkeypatch.undo()
    unisono.shutdown()
    rank, meeting = int(os.environ["UNISONO_RANK"]), shared_tmp_path / "verdict"
    unisono.init(rank=rank, size=2, rendezvous=meeting)
    assert any(unisono.all_gather_object(noticed))  # some things only one rank can check


def test_a_failing_check_ends_the_program_with_a_sentence(tmp_path: Path) -> None:
    text = (FOLDER / "identity.py").read_text()
    broken = tmp_path / "broken.py"
    broken.write_text(text.replace("expected = [", "expected = [-1] + [", 1))
    ended = run_python(broken)
    assert ended.returncode == 1
    assert ended.stderr.endswith("AssertionError: all_reduce gave tensor([0.]), not [-1, 0.0]\n")


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_as_its_first_lines_say(name: str) -> None:
    line = re.search(
        rf"unisono (run -n \d) examples/{name}\.py", (FOLDER / f"{name}.py").read_text()
    )
    assert line
    command = [sys.executable, "-m", "unisono", *line[1].split(), str(FOLDER / f"{name}.py")]
    assert subprocess.run(command).returncode == 0


# -- they are documentation ------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_short_and_says_what_it_shows(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text()
    assert len(text.splitlines()) < 100
    documentation = ast.get_docstring(ast.parse(text))
    assert documentation
    assert re.search(rf"unisono run -n \d examples/{name}\.py", documentation)


def test_the_table_of_contents_has_every_example_once() -> None:
    listed = re.findall(r"^\| \[(\w+)\.py\]\(\1\.py\)", (FOLDER / "README.md").read_text(), re.M)
    assert sorted(listed) == sorted({*EXAMPLES, *OWN_RANKS})


def test_the_notes_name_examples_that_exist() -> None:
    notes = (FOLDER.parent / "docs" / "notes.md").read_text()
    named = re.findall(r"examples/(\w+)\.py", notes)
    assert named
    assert set(named) <= set(EXAMPLES)
