"""What a notebook shows of results: small tables, in which everything is escaped."""

from __future__ import annotations

import dataclasses
from html.parser import HTMLParser
from pathlib import Path

import unisono
from unisono.bench.results import Rows, read
from unisono.watch import RankReport, Report

RESULTS = Path(__file__).parents[1] / "benchmarks/results/neoverse-n1-2-cores-2-ranks.json"


class Table(HTMLParser):
    """The cells of a table, row by row, and which tags there were."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.rows: list[list[str]] = []
        self.bold: list[int] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag == "tr":
            if "bold" in (dict(attrs).get("style") or ""):
                self.bold.append(len(self.rows))
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


def shown(value: object) -> Table:
    table = Table(value._repr_html_())  # type: ignore[attr-defined]
    assert table.tags <= {"div", "p", "b", "table", "thead", "tbody", "tr", "th", "td"}
    return table


def test_of_many_rows_the_first_are_shown() -> None:
    table = shown(Rows(read(RESULTS).in_order[:1] * 150))
    assert len(table.rows) == 1 + 100 + 1
    assert table.rows[-1] == ["50 more rows"]


def test_rows_of_a_benchmark() -> None:
    rows = read(RESULTS).in_order[:3]
    table = shown(Rows([*rows[:2], dataclasses.replace(rows[2], wrong=7)]))
    assert [row[0] for row in table.rows[1:]] == [row.collective for row in rows]
    assert [row[3] for row in table.rows[1:]] == [f"{row.time_us.p50:,.2f}" for row in rows]
    assert table.rows[3][-1] == "7 wrong"
    assert table.bold == [3]


def test_a_report() -> None:
    ranks = (
        RankReport(0, 0, 40, True, call="barrier #2", last="barrier #1"),
        RankReport(1, 1, 41, False, place="a.py:9 in <lambda>", last="barrier #1"),
    )
    verdict = "rank 1 never reached <script>"
    table = shown(Report("hang", verdict, "world", "gloo", "barrier", 2, (1,), ranks=ranks))
    assert verdict in table.text
    assert table.rows[2] == ["rank 1", "41", "no", "is in a.py:9 in <lambda>", "barrier #1"]
    assert table.bold == [2]


def test_a_mesh() -> None:
    table = shown(unisono.Mesh({"dp": 3, "tp": 4}))
    assert "12 ranks: dp 3 x tp 4" in table.text
    assert [row[:3] for row in table.rows[1:]] == [["tp", "4", "3"], ["dp", "3", "4"]]
    assert table.rows[2][-1] == "0 4 8"
