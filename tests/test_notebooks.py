"""What a notebook shows of results: small tables, in which everything is escaped."""

from __future__ import annotations

import pickle
from html.parser import HTMLParser
from pathlib import Path

import pytest

import unisono
from unisono.comm.base import Communicator

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


def test_results_of_a_launch_are_a_list_and_a_table() -> None:
    results = unisono.launch(lambda: f"<b>{unisono.get_rank()}</b>", ranks=2)
    assert results == ["<b>0</b>", "<b>1</b>"]
    assert repr(results) == "['<b>0</b>', '<b>1</b>']"
    assert pickle.loads(pickle.dumps(results)) == results
    assert shown(results).rows == [["rank", "result"], ["0", "'<b>0</b>'"], ["1", "'<b>1</b>'"]]


def test_a_long_result_is_cut_short_and_many_are_counted() -> None:
    from unisono.launcher.functions import RankResults

    table = shown(RankResults(["x" * 10_000] * 150))
    assert len(table.rows) == 1 + 100 + 1
    assert table.rows[-1] == ["50 more rows"]
    assert max(len(cell) for row in table.rows for cell in row) < 400


@pytest.mark.ranks(4)
def test_a_manager(comm: Communicator) -> None:
    manager = unisono.ProcessGroupManager(tp_size=2, dp_size=2)
    table = shown(manager)
    rows = {row[0]: row[1:] for row in table.rows[1:]}
    first, second = comm.rank // 2 * 2, comm.rank % 2
    assert rows["tp"] == ["2", str(comm.rank % 2), f"ranks {first} and {first + 1}"]
    assert rows["dp"] == ["2", str(comm.rank // 2), f"ranks {second} and {second + 2}"]
    manager.close()
