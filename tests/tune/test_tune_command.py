"""`unisono tune` on real ranks: it measures, writes, shows, refuses, and ends on Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tuning_tables import SMALL, table, write_table
from unisono.cli import main
from unisono.comm import engine
from unisono.comm.tuning import FORMAT, read_tuning, table_path
from unisono.launcher.share import core_count
from unisono.tune.document import figures_path, merge
from user_programs import plain_environment

DEADLINE_S = 170


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in ("UNISONO_TUNING", "UNISONO_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["tune", *arguments])
    return result.exit_code, result.stdout, result.stderr


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "unisono", "tune", *arguments],
        env=plain_environment() | {"XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"]},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_table_is_measured_written_and_read_again() -> None:
    path = table_path()
    assert path is not None
    os.makedirs(os.path.dirname(path), 0o700)
    Path(path).write_text(json.dumps(table(7, False, SMALL)))  # of other groups: it stays
    process = start("--ranks", "2", "--budget", "1")
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    assert f"wrote {path}" in out
    assert "2 ranks: starting" in err
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    figures = Path(figures_path(path))
    assert {*Path(path).parent.iterdir()} == {Path(path), figures}, "no drafts are left"
    assert len(Path(path).read_text()) < 3000, "every process reads it"
    document = json.loads(Path(path).read_text())
    assert document["format"] == FORMAT
    assert document["processor"] == engine.processor_model()
    assert [group["ranks"] for group in document["groups"]] == [2, 7]
    group = document["groups"][0]
    assert group["crowded"] == (core_count() < 2)
    rows = json.loads(figures.read_text())["of"]["2"]["measured"]
    assert rows[0]["collective"] == "all_reduce"
    assert all(row["untuned_us"] > 0 for row in rows)
    tuning = read_tuning(2)
    assert tuning is not None
    assert list(tuning.sizes) == [group["sizes"][name] for name in engine.TUNED]

    code, shown, _ = invoke("--show", "--ranks", "2")
    assert code == 0
    assert path in shown
    assert "predicted" in shown
    assert "in the post" in shown
    code, shown, _ = invoke("--show", "--json", "--ranks", "2")
    (listed,) = json.loads(shown)
    assert listed["ways"][0]["us"] == rows[0]["untuned_us"]
    assert listed["ways"][0].keys() >= {"collective", "size_bytes", "way", "us", "why"}


def test_ctrl_c_ends_it_and_leaves_no_table() -> None:
    process = start("--ranks", "2", "--budget", "60")
    assert process.stderr is not None
    assert "starting" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, err
    assert err.strip().splitlines()[-1] == "interrupted: the table is as it was"
    assert "Traceback" not in out + err
    assert not os.path.exists(table_path() or "")


def test_show_without_a_table_shows_the_defaults_and_what_to_do() -> None:
    code, out, err = invoke("--show", "--ranks", "2")
    assert code == 0
    assert "there is no table yet" in err
    assert "not measured" in out
    assert "all_reduce" in out


def test_show_says_what_differs_from_the_defaults_and_which_algorithm_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    steps = {"all_reduce": [{"from_bytes": 1 << 20, "algorithm": "ring"}]}
    crowded = core_count() < 2
    sizes = dict(zip(engine.TUNED, engine.default_tuning(2, crowded), strict=True))
    document = table(2, crowded, sizes | {"all_reduce_turn": 32768}, algorithms=steps)
    monkeypatch.setenv("UNISONO_TUNING", write_table(tmp_path, document))
    code, out, _ = invoke("--show")
    assert code == 0
    assert "all_reduce_turn: 32K in place of 128K" in out
    line = next(line for line in out.splitlines() if line.startswith("all_reduce        1M"))
    assert "cut, 32 turns of 32K" in line
    assert "auto: ring" in line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--ranks", "two"], "write numbers like 2 or 2,4,8"),
        (["--ranks", "1"], "groups of 2 to 128 ranks"),
        (["--ranks", "1000"], "groups of 2 to 128 ranks"),
        (["--budget", "0"], "budget"),
        (["now"], "unexpected extra argument"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(arguments: list[str], says: str) -> None:
    code, _, err = invoke(*arguments)
    assert code == 2
    assert says in err
    assert "Traceback" not in err


def test_a_table_that_is_switched_off_or_damaged_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("UNISONO_TUNING", "off")
    code, _, err = invoke("--show")
    assert code == 2
    assert "UNISONO_TUNING is off" in err
    whole = table(2, False, SMALL)
    strange = [whole["groups"][0], whole["groups"][0] | {"ranks": "two"}]
    for groups in (None, 3, [3], [{"ranks": 2}], strange):
        document = "{" if groups is None else whole | {"groups": groups}
        monkeypatch.setenv("UNISONO_TUNING", write_table(tmp_path, document))
        code, out, err = invoke("--show")
        assert code == 2, (document, out, err)
        assert "damaged" in err


@pytest.mark.parametrize("figures", ['{"of": []}', '{"of": {"2": [1]}}', "[" * 100_000])
def test_a_table_with_damaged_figures_is_a_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, figures: str
) -> None:
    path = write_table(tmp_path, table(2, False, SMALL))
    Path(figures_path(path)).write_text(figures)
    monkeypatch.setenv("UNISONO_TUNING", path)
    code, out, _ = invoke("--show")
    assert code == 0
    assert "all_reduce" in out


def test_a_damaged_table_is_replaced(tmp_path: Path) -> None:
    good = table(2, False, SMALL)["groups"][0]
    damaged = table(7, False, SMALL) | {"groups": [good, good | {"ranks": "seven"}]}
    merged = merge(write_table(tmp_path, damaged), [good])
    assert [group["ranks"] for group in merged["groups"]] == [2]


def test_where_nothing_can_be_written_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("UNISONO_TUNING", str(tmp_path / "file" / "tuning" / "table.json"))
    code, _, err = invoke("--ranks", "2", "--budget", "60")
    assert code == 1
    assert "cannot be written: Not a directory" in err
    assert "starting" not in err, "it was found out before anything was measured"
