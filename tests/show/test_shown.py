"""What commands print and write, from recorded inputs, byte for byte.

golden/ has the texts, and digests of long ones; `GOLDEN=write` in the environment writes them.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

import unisono
from unisono.bench import html
from unisono.bench.compare import compare_runs, lines
from unisono.bench.results import Row, Run, Skipped, summarise, to_json
from unisono.bench.show import Show
from unisono.bench.text import summary
from unisono.cli import main
from unisono.demo import command as demo_command
from unisono.demo import scenes
from unisono.doctor import diagnosis
from unisono.doctor.machine import fail, ok, warn
from unisono.doctor.saved_reports import incident_page, read
from unisono.doctor.self_test import Check, SelfTest
from unisono.watch.command import render
from unisono.watch.report import CallReport, RankReport, Report
from unisono.watch.top import Job, RankRow

GOLDEN = Path(__file__).parent / "golden"
LONG = 12_000
WIDTHS = (60, 110, 160)


def check(name: str, text: str) -> None:
    """Compare a text with the recorded one, or its digest."""
    if len(text) > LONG:
        text = f"{len(text)} characters, {hashlib.sha256(text.encode()).hexdigest()}\n"
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("GOLDEN") == "write":
        file.write_bytes(text.encode())
    assert text == file.read_bytes().decode()


def on_terminals(show: Callable[[Console], object]) -> str:
    """What is shown in terminals of several widths, with colours, and in a pipe."""
    shown = []
    for width in (*WIDTHS, 0):
        colours = {"force_terminal": True, "color_system": "truecolor"} if width else {}
        console = Console(file=io.StringIO(), width=width or 90, legacy_windows=False, **colours)
        show(console)
        shown.append(f"---- {width or 'pipe'}\n{console.file.getvalue()}")
    return "".join(shown)


def without_assets(page: str) -> str:
    return re.sub(r"<(style|script)>.*?</\1>", "", page, flags=re.DOTALL)


# -- bench -----------------------------------------------------------------------------------------


def row(collective: str, size: int, backend: str, time_us: float, **more: object) -> Row:
    spread = more.pop("spread", 0.05)
    assert isinstance(spread, float)
    samples = [time_us * (1 + spread * (at - 20) / 20) for at in range(41)]
    fixed: dict[str, object] = {
        "dtype": "float32", "op": "sum" if "reduce" in collective else "none", "root": -1,
        "ranks": 2, "time_us": summarise(samples), "skew_us": 0.5, "transfer_us": time_us * 0.9,
        "samples": 41,
        "algbw": size / time_us / 1e3, "busbw": size / time_us / 1e3, "wrong": 0, "floor_us": 2.0,
        "expected_us": None, "calibrates": False, "calls_per_sample": 10, "disturbed_share": 0.0,
    }  # fmt: skip
    return Row(collective, size, size // 4, backend=backend, **(fixed | more))  # type: ignore[arg-type]


def bench_run(slower: float = 1.0) -> Run:
    facts = {
        "date": "2026-01-02", "host": "node7", "command": "unisono bench <all>", "processor": "Arm",
        "architecture": "aarch64", "cores": 2, "gpu": "H200", "gpus": 2,
        "hosts": [{"name": "node7", "ranks": 1}, {"name": "node8", "ranks": 1}],
        "link": {"interface": "eth0", "bytes_per_s": 1.25e8, "latency_us": 23.4},
    }  # fmt: skip
    settings = {"ranks": 2, "collectives": ["all_reduce"], "backends": ["unisono", "gloo"]}
    run = Run(facts, {"python": "3.11", "torch": "2.13"}, settings, finished=slower == 1)
    for size in (8, 1024, 65536, 1 << 20):
        expected = {
            "expected_us": 3.0 + size / 1e4,
            "expected_low_us": 2.5,
            "expected_high_us": 5.0,
        }
        calibrates = {"calibrates": True, "floor_us": None}
        some = expected if size in (1024, 65536) else calibrates
        run.rows += [
            row("all_reduce", size, "unisono", (4 + size / 2e4) * slower, **some),
            row(
                "all_reduce",
                size,
                "unisono:ring",
                7.1 + size / 1e4,
                spread=0.9,
                wrong=size // 65536,
            ),
            row("all_reduce", size, "gloo", 123.4 + size / 1e3, disturbed_share=size / 2e6, **some),
        ]
    run.rows += [row("barrier", 0, name, 1.5, op="none") for name in ("unisono", "gloo")]
    run.rows.append(row("broadcast", 64, "unisono", 1234.5 / slower, root=1, expected_us=300.0))
    run.skipped = [
        Skipped("mpi", "mpi4py is not installed", "pip install mpi4py"),
        Skipped("gloo reduce_scatter", "gloo has none"),
    ]
    return run


def test_bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = bench_run()

    def show_run(console: Console) -> None:
        with Show(console) as show:
            about = {"machine": run.machine, "versions": run.versions, "settings": run.settings}
            skipped = [asdict(skipped) for skipped in run.skipped]
            show.handle_event({"event": "begin", **about, "skipped": skipped})
            rows = [row.as_dict() for row in run.rows]
            for at in range(0, len(rows), 3):
                what = {"collective": rows[at]["collective"], "what": "this", "done": 0, "of": 9}
                show.handle_event({"event": "next", **what})
                show.handle_event({"event": "rows", "rows": rows[at : at + 3], "skipped": []})
        for line in summary(run):
            show.print_line(line)

    check("bench", on_terminals(show_run))
    check("bench.json", to_json(run))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    check("bench.html", without_assets(html.page(run)))
    check("bench-compare", "\n".join(lines(compare_runs(run, bench_run(1.4)))) + "\n")


# -- plan ------------------------------------------------------------------------------------------

PLANS = {
    "ranking": "all_reduce -n 64 --nodes 8 --topology h100",
    "two": "broadcast -n 16 --algorithm chain --against lanes --size 1.5K",
    "sizes": "all_reduce -n 8 --sizes 8:1M --topology a100",
    "table": "--table -n 12",
    "show": "show double_tree -n 8",
    "show-ring": "show ring -n 16 --nodes 4 --channels 2",
}


@pytest.mark.parametrize("name", PLANS)
def test_plan(name: str) -> None:
    told = []
    for environment in ({"COLUMNS": "40"}, {"COLUMNS": "150", "FORCE_COLOR": "1"}):
        done = CliRunner().invoke(main, ["plan", *PLANS[name].split()], env=environment)
        told.append(f"---- {environment}\n{done.stdout}")
    done = CliRunner().invoke(main, ["plan", *PLANS[name].split(), "--json"])
    check(f"plan-{name}", "".join(told) + f"---- json\n{done.stdout}")


@pytest.mark.parametrize("name", ["double_tree", "ring", "ring_2d", "hierarchical"])
def test_drawings_and_pages_of_schedules(name: str, tmp_path: Path) -> None:
    drawing, page = tmp_path / "drawing.svg", tmp_path / "page.html"
    ranks = "9" if name == "double_tree" else "16"
    CliRunner().invoke(main, ["plan", "show", name, "-n", ranks, "-o", str(drawing)])
    asked = ["all_reduce", "-n", ranks, "--algorithm", name, "--against", "binomial"]
    CliRunner().invoke(main, ["plan", *asked, "--html", str(page)])
    if drawing.exists():
        check(f"drawing-{name}", drawing.read_text())
    # another zlib compresses the times otherwise
    check(f"page-{name}", re.sub(r'"times":"[^"]*"', "", without_assets(page.read_text())))


# -- doctor ----------------------------------------------------------------------------------------


def test_doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    findings = [
        ok("python", "Python 3.11 on [Linux]"),
        warn("/dev/shm", "64 MiB of 64 MiB free " * 5, "Start the container with --shm-size=1g."),
        fail("kernel", "Linux 2.6", "Use another."),
    ]
    checks = (
        Check("broadcast", True, 12.345),
        Check("all_reduce sum", False, message="rank 1: no"),
    )
    monkeypatch.setattr(diagnosis, "_look", lambda ranks: iter(findings))
    tested = SelfTest("world", "unisono", 0, 2, checks)
    monkeypatch.setattr(diagnosis, "try_backend", lambda backend, ranks: tested)
    for name in list(os.environ):
        if name.startswith(("UNISONO_", "NCCL", "TORCH", "GLOO", "UCX", "OMP", "CUDA", "RANK")):
            monkeypatch.delenv(name)
    for name, value in {"NCCL_DEBUG": "[red]INFO", "UNISONO_JOB_SECRET": "x" * 32}.items():
        monkeypatch.setenv(name, value)
    show = on_terminals(lambda console: diagnosis.run_doctor(2, ["unisono"], console))
    diagnosis.print_json(2, ["unisono"])
    check("doctor", show + capsys.readouterr().out)
    check("doctor-variables", on_terminals(lambda c: diagnosis.print_variables(c, every=True)))


def incident() -> Report:
    done = CallReport("all_reduce #1", "world", "finished", "a.py:3", -3.1, -3.1, -3.05)
    waits = CallReport("all_reduce #2", "world", "waiting", "a.py:3", -3.0, waits_for=(41,))
    waiting = RankReport(
        0, 4, 40, True, place="a.py:3 in <step>", call="all_reduce #2", last="all_reduce #1",
        stack=("MainThread:", "  a.py:3 in step"), calls=(done, waits),
    )  # fmt: skip
    culprit = RankReport(
        1, 5, 41, False, "", "b.py:9 in <load>", "time.sleep", last="all_reduce #1", host="node8",
        stack=("MainThread:", "  b.py:9 in load", "  launcher/child.py:1 in main"),
        source=("     8  if rank == 1:", ">    9      time.sleep(9)"), calls=(done,),
    )  # fmt: skip
    details = ("[bold]one detail[/]", "another")
    call = ("dp", "gloo", "all_reduce", 2, (1,), "a.py:3", 3.0, details, (waiting, culprit))
    return Report("hang", "rank 1 never reached <it>", *call, "2026-01-02T03:04:05+00:00")


def test_saved_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    incident().save("0.json")
    Report("lost", "rank 0 has ended", "world", "unisono").save("1.json")
    shown = []
    for more in ([], ["--stacks"], ["--json"], ["--html", "page.html", "2.json"]):
        for width in ("60", "140"):
            environment = {"COLUMNS": width, "FORCE_COLOR": "1"}
            done = CliRunner().invoke(main, ["doctor", "0.json", "1.json", *more], env=environment)
            shown.append(f"---- {more} {width}\n{done.output}")
    check("reports", "".join(shown))
    check("reports.html", without_assets(Path("page.html").read_text()))
    assert incident_page(read([Path("0.json")])).count("<article>") == 1
    check("report", f"{incident()}\n{incident().to_text()}\n")


# -- top -------------------------------------------------------------------------------------------


def test_top() -> None:
    def rank(number: int, group: str, host: str = "", **more: object) -> RankRow:
        values: dict[str, object] = {
            "group": group, "backend": "unisono", "rank": number, "global_rank": number,
            "pid": 100 + number, "state": "is asleep", "call": "all_reduce #12", "call_s": 12.34,
            "site": "a_long_name_of_a_program.py:1234", "calls": 12345, "calls_a_second": 2345.6,
            "bytes_a_second": 1.25e9, "wait_share": 0.75, "lag_s": 0.0123, "is_stuck": number == 2,
            "host": host, "is_culprit": number == 1,
        }  # fmt: skip
        return RankRow(**(values | more))  # type: ignore[arg-type]

    one = Job("train.py", (100, 101), tuple(rank(at, "world") for at in range(3)), "rank 1 is late")
    idle = {"call": "", "state": "is stopped", "is_culprit": False, "backend": "gloo"}
    rows = (rank(0, "world", "node7"), rank(1, "tp[0]", "node8", **idle))
    jobs = [one, Job("serve.py", (1,), rows)]
    shown = on_terminals(lambda console: console.print(render(jobs, console.width)))
    check("top", shown + on_terminals(lambda console: console.print(render([], 80))))


# -- demo ------------------------------------------------------------------------------------------


def test_demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    outcomes = unisono.launch(scenes.run_all_scenes, 4, threads=1)
    # either rank may be the one that finds the deadlock
    outcomes[0] = replace(outcomes[0], deadlock=unisono.GroupError("a deadlock\n  of two ranks"))
    monkeypatch.setattr("unisono.launcher.functions.launch", lambda *args, **more: outcomes)
    monkeypatch.setattr(demo_command, "_race", lambda: [("8 B", "1.0", "9.5", "9.5")] * 2)
    shown = []
    for environment in ({"PYTHONIOENCODING": "utf-8"}, {"FORCE_COLOR": "1"}):
        report = tmp_path / "report.md"
        done = CliRunner().invoke(main, ["demo", "--report", str(report)], env=environment)
        shown.append(done.output.partition("wrote ")[0])
    told = re.sub(r"^.*Written by", "Written by", report.read_text(), flags=re.M)
    check("demo", "".join(shown) + told)
