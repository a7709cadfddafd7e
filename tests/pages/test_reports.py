"""Pages of benchmarks, in a browser."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from pages.browsing import OpenPage
from unisono.bench import html
from unisono.bench.results import Run, from_json, read

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture(scope="module")
def run() -> Run:
    return read(RESULTS / "neoverse-n1-2-cores-2-ranks.json")


def column(page: Any, name: str) -> list[str]:
    """The texts of a column, of the rows that are seen, from top to bottom."""
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


def test_two_runs_are_compared(run: Run, open_page: OpenPage) -> None:
    row = run.in_order[0]
    times = {name: 3 * value for name, value in dataclasses.asdict(row.time_us).items()}
    slower = dataclasses.replace(row, time_us=type(row.time_us)(**times))
    new = dataclasses.replace(run, rows=[slower, *run.in_order[1:]])
    page = open_page(html.page(new, run), scheme="dark")
    change, *_ = page.locator(".changes li").all_inner_texts()
    assert change.startswith("slower")
    assert "3.00x" in change
    old, new = page.locator(".charts #old path").count(), page.locator(".charts svg").count()
    assert old == new * len({row.backend for row in run.rows})
    assert page.get_by_role("img", name="all_reduce, float32").count() == 2
