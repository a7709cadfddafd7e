"""UNISONO_ variables: an invalid value gives one sentence, never a traceback elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from unisono import variables
from unisono.errors import UnisonoError
from user_programs import run_python, write_program

BAD = {
    "UNISONO_RANK": "first",
    "UNISONO_SIZE": "0",
    "UNISONO_RENDEZVOUS": "fd:x",
    "UNISONO_BACKEND": "gloo,nccl",
    "UNISONO_HOSTID": "a\nb",
    "UNISONO_HOSTS": "mpi",
    "UNISONO_LINK_PATIENCE_S": "2.5",
    "UNISONO_JOB_SECRET": "swordfish",
    "UNISONO_JOB_SECRET_FILE": "/nowhere/secret",
    "UNISONO_REQUIRE_SECRET": "please",
    "UNISONO_UCX": "/nowhere/libucp.so",
    "UNISONO_REPLACE": "nccl",
    "UNISONO_VLLM": "always",
    "UNISONO_EAGER_SEND": "4K",
    "UNISONO_READ_PEERS": "never",
    "UNISONO_COPY_THREADS": "0",
    "UNISONO_SPIN_US": "-1",
    "UNISONO_SITES": "2",
    "UNISONO_CHECK": "maybe",
    "UNISONO_REPRODUCIBLE": "rank",
    "UNISONO_CHECK_SHAPES": "all",
    "UNISONO_TRACEBACK": "short",
    "UNISONO_WATCH": "loud",
    "UNISONO_WATCH_HANG_S": "abc",
    "UNISONO_WATCH_CHECK": "-1",
    "UNISONO_SANITIZE": "perhaps",
    "UNISONO_PROFILE": "maybe",
    "UNISONO_WATCH_FOLDER": "/dev/null",
    "UNISONO_RECORD_KEEPER": "yes",
    "UNISONO_TERMINAL": "maybe",
    "UNISONO_TEST_CHANNEL": "-3",
}


def test_a_text_that_means_nothing_is_one_sentence_with_name_and_text() -> None:
    free = {"UNISONO_ALGO"}  # a program may register any name
    assert {variable.name for variable in variables.ALL} == BAD.keys() | free
    for variable in variables.ALL:
        if variable.name not in free:
            with pytest.raises(UnisonoError) as caught:
                variable.read(BAD)
            text = str(caught.value)
            assert text.startswith(f"{variable.name} must ")
            assert text.endswith(f"not {BAD[variable.name]!r}") != variable.is_secret
            assert not (variable.is_secret and BAD[variable.name] in text)
            assert "\n" not in text


def test_what_texts_mean() -> None:
    assert variables.WATCH.read({"UNISONO_WATCH": "1"}) is True
    assert variables.WATCH.read({"UNISONO_WATCH": "off"}) is False
    assert variables.WATCH.read({"UNISONO_WATCH": ""}) is None
    assert variables.WATCH.read({}) is None
    assert variables.WATCH_HANG_S.read({"UNISONO_WATCH_HANG_S": "2.5"}) == 2.5
    assert variables.WATCH_HANG_S.problem("nan")
    assert variables.RENDEZVOUS.read({"UNISONO_RENDEZVOUS": "fd:7"}) == 7
    assert variables.RENDEZVOUS.read({"UNISONO_RENDEZVOUS": "/a/b"}) == "/a/b"
    assert variables.BACKEND.read({"UNISONO_BACKEND": "Gloo"}) == "gloo"


def test_no_variable_ends_import_torch() -> None:
    code = "import torch, unisono; print('here, watched:', unisono.watch.is_on())"
    done = run_python("-c", code, environment=BAD | {"UNISONO_WATCH": "1"})
    assert done.stdout == "here, watched: True\n", done.stderr
    lines = done.stderr.splitlines()
    assert [line.split()[0] for line in lines] == [  # those that are read here
        "UNISONO_BACKEND",
        "UNISONO_REPLACE",
        "UNISONO_CHECK_SHAPES",
        "UNISONO_WATCH_HANG_S",
        "UNISONO_WATCH_CHECK",
        "UNISONO_WATCH_FOLDER",
        "UNISONO_SANITIZE",
        "UNISONO_PROFILE",
    ]
    assert all(line.endswith(": it is ignored") for line in lines)


def test_a_program_without_torch_hears_of_misspelt_variables_too() -> None:
    code = "import sys, unisono; unisono.init().close(); assert 'torch' not in sys.modules"
    done = run_python("-c", code, environment={"UNISONO_WATCH": "maybe", "UNISONO_WATHC": "1"})
    assert done.stderr.splitlines() == [
        "UNISONO_WATCH must be 0 or 1, not 'maybe': it is ignored",
        "UNISONO_WATHC is not a variable of unisono (did you mean UNISONO_WATCH?): it is ignored",
    ]


def test_a_backend_that_torch_does_not_know_is_a_warning_and_an_error_where_it_is_used() -> None:
    code = "import torch, unisono; print(unisono.watch.is_on()); unisono.init()"
    environment = {"UNISONO_BACKEND": "glooo", "UNISONO_WATCH": "loud"}
    done = run_python("-c", code, environment=environment)
    assert done.stdout == "False\n"
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0].startswith("UNISONO_BACKEND=glooo has no effect: torch has no backend glooo")
    assert lines[0].endswith("did you mean gloo?")
    assert lines[1].startswith("UNISONO_WATCH must be 0 or 1, not 'loud'")
    assert lines[-1].startswith("unisono.errors.UnisonoError: torch has no backend glooo")


def test_who_starts_the_watch_gets_an_error() -> None:
    code = "import unisono; unisono.watch.start()"
    done = run_python("-c", code, environment={"UNISONO_WATCH_HANG_S": "abc"})
    assert done.stderr.splitlines()[-1] == (
        "unisono.errors.UnisonoError: UNISONO_WATCH_HANG_S must be a number of seconds above 0, "
        "not 'abc'"
    )


def test_unisono_run_says_it_before_any_rank_starts(tmp_path: Path) -> None:
    script = write_program(tmp_path, "print('started')")
    done = script.run(
        before=["-m", "unisono", "run", "-n", "2", "--watch"],
        environment={"UNISONO_WATCH_HANG_S": "abc"},
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1] == (
        "Error: UNISONO_WATCH_HANG_S must be a number of seconds above 0, not 'abc'"
    )


def test_a_rank_raises_the_sentence_where_the_value_is_used(tmp_path: Path) -> None:
    script = write_program(tmp_path, "import unisono; unisono.init('unisono')")
    done = script.run(
        before=["-m", "unisono", "run", "-n", "2"], environment={"UNISONO_EAGER_SEND": "4K"}
    )
    assert done.returncode == 1
    assert "UnisonoError: UNISONO_EAGER_SEND must be a number of bytes" in done.stderr
