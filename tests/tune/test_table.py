"""Reading the table: what is used, and what is left out of account with one warning."""

from __future__ import annotations

import copy
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from tuning_tables import LARGE, SMALL, table, write_table
from unisono.comm import engine, tuning
from unisono.comm.tuning import read_tuning, table_path
from user_programs import run_python


@pytest.fixture(autouse=True)
def _nothing_said_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_warned", set())


def read(monkeypatch: pytest.MonkeyPatch, folder: Path, document: Any, ranks: int = 4) -> Any:
    monkeypatch.setenv("UNISONO_TUNING", write_table(folder, document))
    return read_tuning(ranks)


def test_it_lies_in_the_users_cache_folder_and_off_means_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for variable in ("UNISONO_TUNING", "UNISONO_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = table_path()
    assert path is not None
    assert path.startswith(f"{tmp_path}/unisono/tuning/")
    assert path.endswith(f"-{os.cpu_count()}-cores.json")
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / "elsewhere"))
    assert (table_path() or "").startswith(f"{tmp_path}/elsewhere/tuning/")
    monkeypatch.setenv("UNISONO_TUNING", "OFF")
    assert table_path() is None
    monkeypatch.setenv("UNISONO_TUNING", str(tmp_path / "mine.json"))
    assert table_path() == str(tmp_path / "mine.json")


def test_without_a_table_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("UNISONO_TUNING", raising=False)
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path))
    assert read_tuning(2) is None
    assert not caplog.records


def test_a_table_is_for_its_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    document = table(4, False, SMALL)
    found = read(monkeypatch, tmp_path, document)
    assert dict(zip(engine.TUNED, found.sizes, strict=True)) == SMALL
    assert read(monkeypatch, tmp_path, document, ranks=3) is None
    assert not caplog.records


def test_tables_are_the_same_if_they_say_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    steps = {"all_reduce": [{"from_bytes": 1024, "algorithm": "ring"}]}
    first = read(monkeypatch, tmp_path, table(4, False, SMALL))
    backwards = dict(reversed(SMALL.items()))
    assert read(monkeypatch, tmp_path, table(4, False, backwards)).text == first.text
    for other in (
        table(4, False, SMALL | {"cut_from": 2049}),
        table(4, True, SMALL),
        table(4, False, SMALL, algorithms=steps),
        table(4, False, SMALL, algorithms_reordered=steps),
    ):
        assert read(monkeypatch, tmp_path, other).text != first.text


def test_algorithms_by_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    steps = [
        {"from_bytes": 1024, "algorithm": "ring"},
        {"from_bytes": 4096, "algorithm": "engine"},
        {"from_bytes": 9000, "algorithm": "binomial"},
    ]
    found = read(monkeypatch, tmp_path, table(4, False, SMALL, algorithms={"all_reduce": steps}))
    by_size = {0: None, 1023: None, 1024: "ring", 4095: "ring", 4096: None, 9000: "binomial"}
    for size, name in by_size.items():
        assert found.find_algorithm("all_reduce", size, reorder=False) == name
    assert found.find_algorithm("all_reduce", 1024, reorder=True) is None
    assert found.find_algorithm("broadcast", 1024, reorder=False) is None


def _with(**changes: Any) -> dict[str, Any]:
    document = copy.deepcopy(table(4, False, SMALL))
    document["groups"][0] |= changes
    return document


def _steps(*steps: Any) -> dict[str, Any]:
    return _with(algorithms={"all_reduce": list(steps)})


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ("", "damaged"),
        ("{", "damaged"),
        ("[1, 2]", "damaged"),
        ('"text"', "damaged"),
        ("[" * 100_000, "damaged"),
        ("\0" * 50, "damaged"),
        ({"groups": []}, "damaged"),
        (table(4, False, SMALL) | {"format": "unisono-tuning/2"}, "unisono-tuning/2"),
        (table(4, False, SMALL) | {"format": "something else"}, "something else"),
        (table(4, False, SMALL) | {"processor": "Z80"}, "another processor"),
        (table(4, False, SMALL) | {"groups": None}, "damaged"),
        (table(4, False, SMALL) | {"groups": [3]}, "damaged"),
        (_with(sizes={}), "damaged"),
        (_with(sizes=None), "damaged"),
        (_with(crowded="no"), "crowded"),
        (_with(algorithms=[1]), "damaged"),
        (_with(sizes=SMALL | {"cut_from": -1}), "cut_from is -1"),
        (_with(sizes=SMALL | {"cut_from": 0}), "cut_from is 0"),
        (_with(sizes=SMALL | {"cut_from": 1 << 63}), "cut_from"),
        (_with(sizes=SMALL | {"direct_from": 1.5}), "direct_from is 1.5"),
        (_with(sizes=SMALL | {"bypass_from": "8M"}), "bypass_from is '8M'"),
        (_with(sizes=SMALL | {"bypass_from": True}), "bypass_from is True"),
        (_with(sizes=SMALL | {"all_reduce_turn": 64}), "all_reduce_turn is 64"),
        (_with(sizes=SMALL | {"broadcast_turn": 262208}), "broadcast_turn is 262208"),
        (_with(sizes=SMALL | {"all_gather_turn": 5000}), "a multiple of 64"),
        (_with(sizes=SMALL | {"all_to_all_turn": None}), "all_to_all_turn is None"),
        (_steps({"from_bytes": -1, "algorithm": "ring"}), "not a step"),
        (_steps({"from_bytes": 1, "algorithm": "rm -rf"}), "not a step"),
        (_steps({"from_bytes": 1, "algorithm": None}), "not a step"),
        (_steps(*({"from_bytes": n, "algorithm": "ring"} for n in (2, 1))), "not in order"),
        (_steps(*({"from_bytes": n, "algorithm": "ring"} for n in range(65))), "too many"),
        (_steps(7), "damaged"),
    ],
)
def test_what_is_no_table_of_this_machine_is_one_warning(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    document: Any,
    says: str,
) -> None:
    with caplog.at_level(logging.WARNING, "unisono"):
        for _ in range(3):
            assert read(monkeypatch, tmp_path, document) is None
    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith(f"the tuning table {tmp_path}/table.json is left out of account: ")
    assert says in text
    assert "\n" not in text
    assert "UNISONO_TUNING=off" in text


def test_a_table_that_was_asked_for_by_name_must_be_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("UNISONO_TUNING", str(tmp_path / "missing.json"))
    assert read_tuning(2) is None
    assert "No such file" in caplog.text


def test_the_engine_has_the_same_bounds_as_the_reader() -> None:
    for name, (least, most, multiple) in tuning.LIMITS.items():
        for value in (least, most, least + multiple):
            assert tuning.check_size(name, value) == value
        for value in (least - multiple, most + multiple):
            with pytest.raises(ValueError, match=name):
                tuning.check_size(name, value)


def test_reading_takes_no_time_and_imports_nothing(tmp_path: Path) -> None:
    path = write_table(tmp_path, table(2, False, LARGE))
    run = run_python(
        "-c",
        "import sys, time\n"
        "from unisono.comm import tuning\n"
        "before = set(sys.modules)\n"
        "times = []\n"
        "for _ in range(200):\n"
        "    begin = time.perf_counter(); assert tuning.read_tuning(2) is not None\n"
        "    times.append(time.perf_counter() - begin)\n"
        "print(min(times), sorted(set(sys.modules) - before))\n"
        "print([name for name in ('numpy', 'torch') if name in sys.modules])\n",
        environment={"UNISONO_TUNING": path},
    )
    assert run.returncode == 0, run.stderr
    figures, heavy = run.stdout.splitlines()
    least_s, imported = figures.split(" ", 1)
    assert float(least_s) < 0.0003
    assert imported == "[]"
    assert heavy == "[]"
