"""One of each page, opened once: the part of the browser's tests that `make test` runs."""

from __future__ import annotations

from pathlib import Path

from pages.browsing import OpenPage, until
from unisono.bench import html
from unisono.bench.results import read
from unisono.doctor.saved_reports import Incident, Reading, incident_page
from unisono.plan import find, verify
from unisono.plan.player import schedule_page
from unisono.watch.report import CallReport, RankReport, Report

RESULTS = Path(__file__).parents[2] / "benchmarks/results/neoverse-n1-2-cores-2-ranks.json"


def test_every_kind_of_page_opens_and_works(open_page: OpenPage) -> None:
    schedule = find("all_reduce", "ring").schedule(4)
    verify(schedule)
    page = open_page(schedule_page(schedule))
    page.get_by_label("speed").select_option("8")
    page.locator("[data-do=play]").click()
    until(page, "player.time === player.duration && !player.isPlaying")
    held = "(({held, values}) => Array.from(held, (at) => values.count[at]))(player.parts[0].model)"
    assert page.evaluate(held) == [4] * 16

    run = read(RESULTS)
    page = open_page(html.page(run))
    page.get_by_role("button", name="time us").click()
    values = page.locator("#figures td.time-us").evaluate_all(
        "cells => cells.map(cell => Number(cell.dataset.value))"
    )
    assert len(values) == len(run.rows)
    assert values == sorted(values)

    waits = CallReport("all_reduce #2", "world", "waiting", "a.py:3", -3.0, waits_for=(41,))
    ranks = (RankReport(0, 0, 40, True, calls=(waits,)), RankReport(1, 1, 41, False))
    report = Report("hang", "rank 1 never came", "world", "unisono", "", 2, (1,), ranks=ranks)
    page = open_page(incident_page(Reading((Incident(report, (Path("report-0.json"),)),), ())))
    assert page.locator("h1").inner_text() == "rank 1 never came"
    assert page.locator(".ranks .wait").inner_text() == "all_reduce #2 a.py:3, for rank 1"
