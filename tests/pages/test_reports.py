"""Pages of benchmarks and of incidents, in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pages.browsing import OpenPage
from unisono.bench import html
from unisono.bench.results import Run, from_json, read
from unisono.doctor.saved_reports import Incident, Reading, incident_page
from unisono.watch.report import CallReport, RankReport, Report

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture(scope="module")
def run() -> Run:
    return read(RESULTS / "neoverse-n1-2-cores-2-ranks.json")


def column(page: Any, name: str) -> list[str]:
    """The texts of a column in the visible rows, from top to bottom."""
    cells: list[str] = page.locator(f"#figures tbody tr:not([hidden]) td.{name}").all_inner_texts()
    return cells


def test_figures_are_sorted_by_a_click(run: Run, open_page: OpenPage) -> None:
    page = open_page(html.page(run))
    times = [row.time_us.p50 for row in run.rows]
    head = page.get_by_role("button", name="time us")
    for way, expected in (("ascending", sorted(times)), ("descending", sorted(times)[::-1])):
        head.click()
        assert page.locator("#figures th[aria-sort]").get_attribute("aria-sort") == way
        shown = page.locator("#figures td.time-us").evaluate_all(
            "cells => cells.map(cell => Number(cell.dataset.value))"
        )
        assert shown == pytest.approx(expected, rel=1e-4)


def test_figures_are_filtered_by_words(run: Run, open_page: OpenPage) -> None:
    page = open_page(html.page(run))
    backend, collective = run.rows[0].backend, run.rows[0].collective
    page.get_by_label("filter rows by words").fill(f"{backend} {collective}")
    shown = {(row.collective, row.backend) for row in run.rows if collective in row.collective}
    assert set(column(page, "collective")) == {name for name, _ in shown}
    expected = sum(row.backend == backend and collective in row.collective for row in run.rows)
    assert len(column(page, "backend")) == expected
    assert page.locator("#count").inner_text() == f"{expected} of {len(run.rows)} rows"


def test_the_data_is_inside(run: Run, open_page: OpenPage, tmp_path: Path) -> None:
    page = open_page(html.page(run))
    with page.expect_download() as download:
        page.get_by_role("button", name="Download the data").click()
    download.value.save_as(tmp_path / "run.json")
    assert from_json((tmp_path / "run.json").read_text()).rows == run.in_order


def incident() -> Reading:
    def calls(pids: tuple[int, ...], state: str) -> tuple[CallReport, ...]:
        done = CallReport("all_reduce #1", "world", "finished", "a.py:3", -3.1, -3.1, -3.05)
        waits = CallReport("all_reduce #2", "world", state, "a.py:3", -3.0, waits_for=pids)
        return (done, waits) if state else (done,)

    ranks = tuple(
        RankReport(rank, rank, 40 + rank, rank != 1, calls=calls((41,), "waiting"))
        for rank in range(40)
    )
    culprit = RankReport(
        *(1, 1, 41, False, "", "a.py:9 in <b>", "time.sleep"),
        stack=("MainThread:", "  a.py:9 in <b>", "  launcher/child.py:1 in main"),
        source=("     8  if rank == 1:", ">    9      time.sleep(9)"),
        calls=calls((), ""),
    )
    ranks = (ranks[0], culprit, *ranks[2:])
    verdict = "rank 1 never reached </script><script>alert(1)</script>"
    report = Report("hang", verdict, "world", "unisono", "all_reduce", 2, (1,), ranks=ranks)
    return Reading((Incident(report, (Path("report-0.json"),)),), ())


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_an_incident_is_explained(scheme: str, width: int, open_page: OpenPage) -> None:
    reading = incident()
    page = open_page(incident_page(reading), scheme=scheme, width=width)
    assert page.locator("h1").inner_text() == reading.incidents[0].report.verdict
    assert page.locator(".source .at").inner_text().split() == ["9", "time.sleep(9)"]
    assert "launcher" not in page.locator(".culprit .stack").inner_text()
    assert page.locator(".todo li").count() > 0
    # all but the culprit wait for it
    assert (
        page.locator(".ranks .wait").all_inner_texts() == ["all_reduce #2 a.py:3, for rank 1"] * 39
    )
    assert page.locator("tr.blamed td").first.inner_text() == "1"
    assert page.locator("tr.blamed").count() == 1
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
