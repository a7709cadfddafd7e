"""`unisono doctor FILE...`: reports that ranks saved, read by the command."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner, Result

from unisono import watch
from unisono.cli import main
from unisono.comm.communicator import Communicator
from unisono.errors import CollectiveMismatch
from unisono.watch.report import RankReport, Report
from user_programs import WriteProgram, eventually, plain_environment

PAGE = Path(__file__).parents[2] / "docs" / "diagnosis.md"
WATCHED = ("-m", "unisono", "run", "--watch", "-n")


def doctor(*args: str | Path) -> Result:
    return CliRunner().invoke(main, ["doctor", *map(str, args)])


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("report-*.json"))


def report(**more: object) -> Report:
    told: dict[str, object] = {
        "kind": "hang",
        "verdict": "rank 1 never came",
        "group": "dp",
        "backend": "gloo",
        "operation": "barrier",
        "call": 3,
        "culprits": (1,),
        "ranks": (RankReport(0, 4, 41, True), RankReport(1, 5, 42, False, last="barrier #2")),
    }
    return Report(**(told | more))  # type: ignore[arg-type]


# -- ranks that fail, and save what they know ------------------------------------------------------


def test_the_page_shows_what_its_program_leads_to(tmp_path: Path, program: WriteProgram) -> None:
    text = PAGE.read_text().partition("## Saved reports")[2]
    (snippet,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    expected = re.findall(r"```text\n(.*?)```", text, re.DOTALL)[0]
    ran = program(snippet, "train.py").run(before=(*WATCHED, "4"))
    assert ran.returncode == 1
    assert saved(tmp_path) == [f"report-{rank}.json" for rank in range(4)]
    command = [sys.executable, "-m", "unisono", "doctor", *saved(tmp_path)]
    wide = plain_environment() | {"COLUMNS": "200"}
    out = subprocess.check_output(command, env=wide, cwd=tmp_path, text=True)
    assert plain(out) == plain(expected)
    told = watch.load(tmp_path / "report-0.json")
    waiting, late = told.ranks[0], told.ranks[2]
    assert [call.name for call in late.calls] == [f"all_reduce #{call}" for call in (1, 2, 3)]
    assert waiting.calls[-1].name == "all_reduce #4"
    assert waiting.calls[-1].waits_for == (late.pid,)
    assert -60 < waiting.calls[-1].arrived_s < -1.9  # out of the two seconds that it waited
    (marked,) = [line for line in late.source if line.startswith(">")]
    assert marked.endswith("time.sleep(4)  # a slow disk")
    subprocess.run([*command, "--html", "incident.html"], cwd=tmp_path, check=True)
    page = (tmp_path / "incident.html").read_text()
    assert page.count('<td class="wait">') == 3
    assert "What to do" in page


def plain(text: str) -> list[str]:
    """Without what changes from run to run: process ids, the time, the launcher's frames, and how
    far the ranks that gave up have got since."""
    text = re.sub(r"after \d+ s", "after 2 s", re.sub(r"\(pid \d+\)", "(pid 1)", text))
    text = re.sub(r"^( +\d) +\d+ ", r"\1 1 ", text, flags=re.MULTILINE)
    lines = [re.sub(" +", " ", line).rstrip() for line in text.splitlines()]
    lines = [re.sub(r"^( \d 1 yes) .*", r"\1", line) for line in lines if line]
    return [line for line in lines if not line.startswith((" launcher/", " <string>", "--stacks"))]


@pytest.mark.ranks(3)
def test_a_mismatch_is_told_once_by_all_ranks(comm: Communicator, shared_tmp_path: Path) -> None:
    watch.start(hang_s=30)
    try:
        with pytest.raises(CollectiveMismatch) as caught:
            comm.all_reduce(torch.ones(10 + (comm.rank == 1)))
        caught.value.report.save(shared_tmp_path / f"report-{comm.rank}.json")
        assert eventually(lambda: len(saved(shared_tmp_path)) == 3)
    finally:
        watch.stop()
    if comm.rank == 0:
        shown = doctor(*(shared_tmp_path / name for name in saved(shared_tmp_path)))
        assert (shown.exit_code, shown.stderr) == (0, "")
        verdict, *calls = shown.stdout.splitlines()[:3]
        assert verdict.startswith("rank 1 made a different call than the others in call #1 of ")
        assert calls[0].startswith("  ranks 0 and 2: all_reduce of float32, 10 elements, sum at ")
        assert calls[1].startswith("  rank 1: all_reduce of float32, 11 elements, sum at ")
        assert shown.stdout.count("made a different call") == 1


def test_a_death_is_told_by_those_who_survive(tmp_path: Path, program: WriteProgram) -> None:
    script = program("""
        import numpy, os, signal, unisono
        comm = unisono.init()
        comm.barrier()
        if comm.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            comm.all_reduce(numpy.ones(10))
        except unisono.GroupError as error:
            error.report.save(f"report-{comm.rank}.json")
    """)
    assert script.run(before=(*WATCHED, "3")).returncode == 128 + 9
    assert saved(tmp_path) == ["report-1.json", "report-2.json"]
    files = [str(tmp_path / name) for name in saved(tmp_path)]
    shown = doctor("--json", *files)
    assert (shown.exit_code, shown.stderr) == (0, "")
    told = json.loads(shown.stdout)
    (incident,) = told["reports"]
    assert told["problems"] == []
    assert incident["files"] == files
    assert (incident["culprits"], incident["call"], incident["kind"]) == ([0], 2, "lost")
    assert incident["ranks"][0]["last"].startswith("barrier #1")


@pytest.mark.ranks(2)
def test_gloo_where_it_is_watched(comm: Communicator, shared_tmp_path: Path) -> None:
    watch.start(hang_s=30)
    try:
        store = dist.FileStore(str(shared_tmp_path / "store"), 2)
        limit = timedelta(seconds=2)
        dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=2, timeout=limit)
        dist.barrier()
        file = shared_tmp_path / "report.json"
        if comm.rank == 1:
            assert eventually(file.exists)
            return
        with pytest.raises(RuntimeError) as caught:
            dist.all_reduce(torch.ones(3))
        caught.value.report.save(file)  # type: ignore[attr-defined]
        shown = doctor(file)
        assert shown.exit_code == 0, shown.output
        assert shown.output.startswith("rank 1 never reached all_reduce #2 of group world (")
        assert "programs.py" in shown.output.partition("rank 1 (pid")[2]
    finally:
        watch.stop()


# -- which reports are one incident ----------------------------------------------------------------


def test_the_one_that_says_most_speaks_for_all(tmp_path: Path) -> None:
    knowing = RankReport(1, 5, 42, False, place="a.py:7 in f", stack=("MainThread:", "  a.py:7"))
    ranks = report().ranks[0], knowing
    report().save(tmp_path / "report-0.json")
    report(kind="lost", verdict="rank 1 has gone", ranks=ranks).save(tmp_path / "report-1.json")
    report(call=4, verdict="another one").save(tmp_path / "report-2.json")
    shown = doctor(*(tmp_path / name for name in saved(tmp_path)))
    assert shown.exit_code == 0
    assert "rank 1 never came" not in shown.output
    assert shown.output.index("rank 1 has gone") < shown.output.index("another one")
    assert "global rank" in shown.output
    assert re.search(r"^ +1 +5 +42 +no +a.py:7 in f", shown.output, re.M)


def test_hosts_are_shown_where_there_are_several(tmp_path: Path) -> None:
    ranks = (
        RankReport(0, 0, 17, True, last="barrier #2", host="node7"),
        RankReport(1, 1, 17, False, last="barrier #2", stack=("a.py:1 in f",), host="node8"),
    )
    report(ranks=ranks).save(tmp_path / "a.json")
    report(ranks=(replace(ranks[0], host="node6"), ranks[1])).save(tmp_path / "b.json")
    shown = doctor(tmp_path / "a.json", tmp_path / "b.json").stdout
    assert re.search(r"rank +pid +host +came", shown)
    assert re.search(r"1 +17 +node8 +no", shown)
    assert "rank 1 (pid 17 on node8)" in shown
    assert shown.count("rank 1 never came") == 2  # other processes: another incident


def test_words_are_shown_as_they_are(tmp_path: Path) -> None:
    report(verdict="rank 1 is in [bold]x[/], :warning:").save(tmp_path / "a.json")
    shown = doctor(tmp_path / "a.json")
    assert shown.output.startswith("rank 1 is in [bold]x[/], :warning:\n")


# -- files that are none ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "cannot be read: No such file or directory"),
        ("", "is not a report of unisono"),
        ("rank 1 never came", "is not a report of unisono"),
        ("[1, 2]", "is not a report of unisono"),
        pytest.param("[" * 100_000, "is not a report of unisono", id="nested"),
        ("{}", "is not a report of unisono"),
        ('{"format": "a trace"}', "is not a report of unisono"),
        ('{"format": "unisono report 1"}', "is not a report of unisono"),
        ('{"format": "unisono report 2", "new": 1}', "was written by another version of unisono"),
        ("\udcff", "is not a report of unisono"),
    ],
)
def test_one_line_for_what_is_no_report(tmp_path: Path, text: str | None, why: str) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    report().save(good)
    if text is not None:
        bad.write_text(text, errors="surrogateescape")
    shown = doctor(bad, good)
    assert shown.exit_code == 1
    assert shown.stderr == f"Error: {bad} {why}\n"
    assert shown.stdout.startswith("rank 1 never came\n")


@pytest.mark.parametrize(
    "wrong",
    [
        {"verdict": 5},
        {"call": "3"},
        {"culprits": ["1"]},
        {"waited_s": None},
        {"details": [1]},
        {"ranks": [{"rank": 1}]},
        {"ranks": 3},
        {"more": 1},
    ],
)
def test_a_field_of_another_type(tmp_path: Path, wrong: dict[str, object]) -> None:
    report().save(tmp_path / "a.json")
    told = json.loads((tmp_path / "a.json").read_text())
    (tmp_path / "a.json").write_text(json.dumps(told | wrong))
    shown = doctor("--json", tmp_path / "a.json")
    assert shown.exit_code == 1
    assert json.loads(shown.stdout)["reports"] == []
    assert shown.stderr.endswith("a.json is not a report of unisono\n")


@pytest.mark.parametrize("option", [["-n", "2"], ["--variables"], ["--backends", "gloo"]])
def test_what_does_not_go_together(tmp_path: Path, option: list[str]) -> None:
    report().save(tmp_path / "a.json")
    shown = doctor(*option, tmp_path / "a.json")
    assert shown.exit_code == 2
    assert shown.stderr.endswith("cannot be used with saved reports\n")
    assert doctor("--stacks").exit_code == 2
