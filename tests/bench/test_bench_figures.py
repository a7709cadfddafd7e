"""What `unisono bench` computes: nccl-tests' bandwidths, statistics, files, verdicts."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import runpy
import sys
from pathlib import Path

import numpy
import pytest
from click.testing import CliRunner

from unisono.bench import html, plot
from unisono.bench.collectives import COLLECTIVES, bandwidths, gradient_counts, item_bytes
from unisono.bench.command import _save
from unisono.bench.compare import compare_runs
from unisono.bench.results import Row, Run, Skipped, from_json, summarise, to_json
from unisono.bench.settings import BenchSettings
from unisono.bench.text import COLUMNS, cells, summary
from unisono.cli import main
from unisono.errors import UnisonoError


def row(backend: str = "unisono", size: int = 1024, **changes: object) -> Row:
    """A row that took about 10 us."""
    samples = changes.pop("samples_us", numpy.linspace(9.5, 10.5, 41))
    values = Row(
        collective="all_reduce",
        size_bytes=size,
        count=size // 4,
        dtype="float32",
        op="sum",
        root=-1,
        backend=backend,
        ranks=2,
        time_us=summarise(samples),
        skew_us=0.5,
        transfer_us=9.0,
        algbw=0.1,
        busbw=0.1,
        wrong=0,
        floor_us=2.0,
        expected_us=None,
        calibrates=False,
        samples=41,
        calls_per_sample=10,
        disturbed_share=0.0,
    )
    return dataclasses.replace(values, **changes)


def run(*rows: Row) -> Run:
    """A finished run of these rows."""
    facts = {"processor": "Test", "architecture": "none", "cores": 2}
    settings = {"ranks": 2, "collectives": ["all_reduce"], "backends": ["unisono", "gloo"]}
    return Run(facts, {"python": "3"}, settings, list(rows), finished=True)


# -- nccl-tests' formulas ----------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_bandwidths_are_those_of_nccl_tests(ranks: int) -> None:
    # nccl-tests, doc/PERFORMANCE.md: busbw = algbw * factor
    moved_once = ("reduce_scatter", "all_gather", "gather", "scatter", "all_to_all")
    factors = dict.fromkeys(moved_once, (ranks - 1) / ranks)
    moved_twice = ("all_reduce", "all_reduce_async", "gradients")
    factors |= dict.fromkeys(moved_twice, 2 * (ranks - 1) / ranks)
    factors |= dict.fromkeys(("broadcast", "reduce", "ping_pong", "stream"), 1.0)
    assert set(factors) == set(COLLECTIVES) - {"barrier"}
    for name, factor in factors.items():
        algbw, busbw = bandwidths(COLLECTIVES[name], 4_000_000_000, 2.0, ranks)
        assert algbw == pytest.approx(2.0)  # GB = 1e9
        assert busbw == pytest.approx(2.0 * factor)
    assert bandwidths(COLLECTIVES["barrier"], 0, 1.0, ranks) == (0.0, 0.0)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_sizes_are_those_of_nccl_tests(ranks: int) -> None:
    for name, collective in COLLECTIVES.items():
        counts = collective.counts(4096, 4, ranks)
        if name == "barrier":
            assert counts.size == 0
            continue
        part = 1024 // ranks
        assert counts.size == (part * ranks if collective.wide else 1024)
        wide_output = name in ("all_gather", "gather", "all_to_all")
        wide_input = name in ("reduce_scatter", "scatter", "all_to_all")
        assert counts.output == (part * ranks if wide_output else part if wide_input else 1024)
        assert counts.input == (part * ranks if wide_input else part if wide_output else 1024)
        assert collective.counts(1, 4, ranks).size >= 1  # never empty


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 47, 48, 1000, 1 << 20])
def test_gradients_are_all_elements(count: int) -> None:
    counts = gradient_counts(count)
    assert sum(counts) == count
    assert min(counts) >= 1


def test_item_bytes() -> None:
    assert [item_bytes(name) for name in ("float32", "bfloat16", "int8", "int64")] == [4, 2, 1, 8]


# -- statistics --------------------------------------------------------------------------------


def test_statistics_of_known_samples() -> None:
    samples = list(range(1, 102))  # 1..101: the p-th percentile is p + 1
    random.Random(1).shuffle(samples)
    found = summarise(samples)
    assert (found.min, found.p25, found.p50, found.p75) == (1, 26, 51, 76)
    assert (found.p95, found.p99, found.max, found.mean) == (96, 100, 101, 51)
    assert found.spread == pytest.approx(50 / 51)
    assert found.low < found.p50 < found.high
    alone = summarise([7.0])
    assert (alone.p50, alone.low, alone.high, alone.spread) == (7, 7, 7, 0)
    with pytest.raises(ValueError, match="at least one"):
        summarise([])


def test_the_median_lies_in_its_interval_as_often_as_promised() -> None:
    generator = numpy.random.default_rng(7)
    hits = 0
    for _ in range(400):
        found = summarise(generator.exponential(size=60))
        hits += found.low <= numpy.log(2) <= found.high
    assert hits >= 0.93 * 400


# -- verdicts ----------------------------------------------------------------------------------


def test_verdicts() -> None:
    assert row(expected_us=10.0).verdict == "normal"
    assert row(expected_us=10.0 / 1.8).verdict == "slow by 1.8x"
    assert row(expected_us=20.0).verdict == "fast by 2.0x"
    assert row(calibrates=True).verdict == "calibrates"
    assert row().verdict == ""
    # Samples that differ by as much as the median do not tell slow from normal.
    assert row(expected_us=10.0 / 1.8, samples_us=[5, 6, 10, 14, 15]).verdict == "normal"


def test_samples_that_spread_let_expect_a_range() -> None:
    narrow = row(expected_us=10.0, expected_low_us=9.5, expected_high_us=10.5)
    wide = row(expected_us=5.0, expected_low_us=4.0, expected_high_us=9.0)
    spread = row(expected_us=10.0, samples_us=[5, 6, 10, 14, 15])
    assert [each.agrees for each in (narrow, wide, spread, row())] == [True, False, False, False]
    assert wide.verdict == "normal"  # the median is twice what was expected, and in the range
    assert row(expected_us=5.0, expected_low_us=4.0, expected_high_us=7.0).verdict == "slow by 2.0x"
    judged = run(narrow, wide, spread)
    assert judged.held_out_error == {"unisono": 0.0}
    expected = [column.heading for column in COLUMNS].index(">expected")
    shown = [cells(each, None)[expected][1] for each in judged.rows]
    assert shown == ["10.0", "3.20-11.2", "8.00-12.5"]
    assert "3 of 3 rows outside the fit lie in their range" in summary(judged)[0]


def test_every_row_outside_its_range_is_named() -> None:
    lines = "\n".join(summary(run(row(expected_us=10.0 / 1.8), row("gloo", expected_us=20.0))))
    assert "all_reduce of 1 KiB on unisono is slow by 1.8x (4.44-6.94 us)" in lines
    assert "all_reduce of 1 KiB on gloo is fast by 2.0x (16.0-25.0 us)" in lines
    assert "0 of 2 rows outside the fit lie in their range" in lines


def test_a_file_of_before_there_were_ranges_is_read() -> None:
    document = json.loads(to_json(run(row(expected_us=10.0))))
    for name in ("expected_low_us", "expected_high_us"):
        del document["rows"][0][name]
    (again,) = from_json(json.dumps(document)).rows
    assert again.verdict == "normal"


# -- files -------------------------------------------------------------------------------------


def test_json_round_trip() -> None:
    before = run(row(), row("gloo", wrong=3), row(size=4096, expected_us=5.0, skew_us=None))
    before.skipped.append(Skipped("mpi", "not here", "pip install mpi4py"))
    text = to_json(before)
    after = from_json(text)
    before.rows = before.in_order
    assert after == before
    document = json.loads(text)
    assert document["schema"] == "unisono-bench/1"
    assert document["rows"][0]["verdict"] == ""
    assert document["held_out_error"] == {"unisono": pytest.approx(0.5)}  # 5 us out of 10
    assert "environ" not in text


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": "another/1", "rows": []}'])
def test_files_that_are_not_results(text: str) -> None:
    with pytest.raises(UnisonoError, match=r"that\.json is not (JSON|a result)"):
        from_json(text, "that.json")


def test_markdown_has_backends_side_by_side() -> None:
    record = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "record.py"))
    text = record["side_by_side"](run(row(), row("gloo", samples_us=[40.0] * 5), row(size=4096)))
    assert "| all_reduce | 1 KiB | 10.0 | 40.0 | 2.00 | 4.00 |" in text
    assert "| all_reduce | 4 KiB | 10.0 | - | 2.00 | - |" in text


def test_the_page_stands_alone() -> None:
    rows = [
        row(name, size, wrong=int(size == 64)) for name in ("unisono", "gloo") for size in (8, 64)
    ]
    page = html.page(run(*rows))
    assert page.count("<svg") == 2  # time and bandwidth
    what = "all_reduce, float32, sum, 2 ranks"
    assert f"<title>{what}: time of one call, us</title>" in page
    curves = page[page.index("<svg") : page.rindex("</svg>")]
    # Colours follow the page's, and the axes show plain numbers.
    assert not re.search("#[0-9a-f]{6}", curves)
    assert re.search(">0.001<", curves)
    assert page.count('<tr class="wrong"') == 2
    assert "How to read this" in page
    assert "WRONG RESULTS" in page
    for outside in ("http://", "https://", " src=", "url("):
        assert outside not in page


def banner(*rows: Row, finished: bool = True) -> tuple[str, str]:
    """The colour and the heading of the first panel of a run's page."""
    told = run(*rows)
    told.finished = finished
    found = re.search(r'<section class="panel verdicts ?(\w*)"><h2>(.*?)</h2>', html.page(told))
    assert found is not None
    return found[1], found[2]


def test_the_banner_claims_only_what_was_measured() -> None:
    few = "Every result was exact; too few sizes to say whether a time is as expected"
    assert banner(row(), row(size=64)) == ("", few)
    judged = "Every result was exact, and of 1 time with an expected value none was slower"
    assert banner(row(calibrates=True), row(expected_us=10.0)) == ("well", judged)
    assert banner(row(expected_us=10.0), finished=False) == ("slow", judged)
    slow = "Every result was exact; 1 of 2 times slower than expected"
    assert banner(row(expected_us=10.0), row(expected_us=2.0)) == ("slow", slow)
    unchecked = row(collective="barrier", size=0)
    assert banner(unchecked)[1].startswith("No result to check; ")


def test_a_busy_machine_is_said_at_the_top() -> None:
    busy = [row(disturbed_share=0.9), row(size=64, expected_us=10.0), row("gloo")]
    said = "The machine was busy: other programs disturbed 1 of 3 rows"
    assert banner(*busy) == ("slow", said)
    page = html.page(run(*busy))
    assert "on average, and ahead in 0 of 1 row, on a busy machine</h1>" in page
    assert "<li>Every result was exact, and of 1 time " in page
    assert banner(*busy, row(size=64, wrong=1)) == ("wrong", "Wrong results")


def test_a_file_that_cannot_be_written_is_told_and_the_others_are(tmp_path: Path) -> None:
    written = tmp_path / "run.html"
    assert _save(run(row()), Path("/dev/full"), None, written)
    assert written.read_text().startswith("<!")
    assert not _save(run(row()), tmp_path / "run.json", None, None)


def test_a_plot_of_one_size_has_bars_and_names(tmp_path: Path) -> None:
    one_size = [row(), row("gloo", samples_us=numpy.full(41, 123.0))]
    barriers = [row(name, size=0, collective="barrier") for name in ("unisono", "mpi")]
    plot.save(run(*one_size, *barriers), tmp_path / "bars.svg")
    drawn = re.findall(r"<text[^>]*>([^<]*)</text>", (tmp_path / "bars.svg").read_text())
    assert {"unisono", "gloo", "mpi", "123", "1 KiB", "bus bandwidth, GB/s"} <= {*drawn}
    assert drawn.count("time of one call, us") == 2
    assert drawn.count("bus bandwidth, GB/s") == 1  # a barrier has none
    plot.save(run(row(), row(size=64), row("gloo"), row("gloo", size=64)), tmp_path / "lines.svg")
    drawn = re.findall(r"<text[^>]*>([^<]*)</text>", (tmp_path / "lines.svg").read_text())
    assert {"unisono", "gloo"} <= {*drawn}


def test_without_matplotlib_the_page_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = html.page(run(row(size=8), row(size=64)))
    assert "The curves need matplotlib: <code>pip install &#x27;unisono[plot]&#x27;</code>" in page
    assert "<svg" not in page
    assert page.count("<tr class=") == 2


# -- comparing ---------------------------------------------------------------------------------


def noisy(generator: random.Random, median_us: float, spread: float) -> list[float]:
    """Samples around a median, half of them within +- spread/2."""
    return [median_us * (1 + spread * generator.uniform(-1, 1)) for _ in range(101)]


def test_compare_finds_slow_downs_and_leaves_noise_alone() -> None:
    generator = random.Random(3)
    sizes = [8 * 4**power for power in range(12)]
    for spread in (0.02, 0.3):
        old = run(*(row(size=size, samples_us=noisy(generator, 10, spread)) for size in sizes))
        new = run(*(row(size=size, samples_us=noisy(generator, 10, spread)) for size in sizes))
        assert not compare_runs(old, new).is_regression
        slow = run(
            *(
                row(size=size, samples_us=noisy(generator, 18 if size == 512 else 10, spread))
                for size in sizes
            )
        )
        comparison = compare_runs(old, slow)
        assert [change.new.size_bytes for change in comparison.of_kind("slower")] == [512]
        assert comparison.is_regression
        back = compare_runs(slow, old)
        assert [change.new.size_bytes for change in back.of_kind("faster")] == [512]
        assert not back.is_regression


def test_a_median_that_moved_within_the_spread_is_noise() -> None:
    old = run(row(samples_us=[6, 8, 10, 12, 14]))
    new = run(row(samples_us=[7, 9, 11.5, 14, 16]))
    comparison = compare_runs(old, new)
    assert [change.kind for change in comparison.changes] == ["noise"]


def test_runs_on_different_devices_are_not_compared() -> None:
    old, new = run(row()), run(row())
    new.settings["device"] = "cuda"
    with pytest.raises(UnisonoError, match="the old run measured tensors on cpu, the new one on"):
        compare_runs(old, new)


def test_compare_as_a_command(tmp_path: Path) -> None:
    old, slow, other = (tmp_path / name for name in ("old.json", "slow.json", "other.json"))
    old.write_text(to_json(run(row(), row("gloo"))))
    slow.write_text(to_json(run(row(samples_us=[20.0] * 9), row("gloo", wrong=2))))
    other.write_text(to_json(run(row(size=1 << 20))))

    def invoke(*arguments: object) -> tuple[int, str]:
        result = CliRunner().invoke(main, ["bench", "compare", *map(str, arguments)])
        return result.exit_code, result.output

    code, output = invoke(old, old)
    assert (code, "2 rows in both: 0 slower" in output) == (0, True)
    code, output = invoke(old, slow)
    assert code == 1
    assert "slower  all_reduce 1 KiB unisono: 10.0 -> 20.0 us, 2.00x" in output
    assert "wrong   all_reduce 1 KiB gloo" in output
    assert invoke(old, slow, "--threshold", "150")[0] == 1  # wrong stays wrong
    assert invoke(old, other) == (2, f"Error: {old} and {other} have no row in common\n")
    code, output = invoke(old, tmp_path / "missing.json")
    assert (code, output.count("\n")) == (2, 1)
    assert "missing.json cannot be read: No such file" in output


# -- settings ----------------------------------------------------------------------------------


def test_no_row_calibrates_where_none_is_left_to_predict() -> None:
    def calibrating(*sizes: int) -> list[int]:
        settings = BenchSettings(2, ("all_reduce", "barrier"), sizes, ("gloo",))
        return [case.size_bytes for case, calibrates in settings.cases() if calibrates]

    assert calibrating(8, 64 << 10, 1 << 20) == []
    assert calibrating(8, 16, 32) == [8, 32]


def test_memory_is_counted_for_the_largest_row() -> None:
    settings = BenchSettings(2, ("barrier", "all_gather"), (8, 1 << 20), ("gloo",))
    need, what = settings.memory_bytes()
    # The output, half an input, and the copies of the backend and the floor, on two ranks.
    assert need == 2 * (1 << 20) * (1 + 0.5 + 1 + 1)
    assert what == "all_gather of 1MB"
