"""Where ranks are drawn on the page of a schedule, and what the command rejects."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from unisono.cli import main
from unisono.plan import catalog, find
from unisono.plan.arrangement import arrange
from unisono.plan.player import schedule_page


@pytest.mark.parametrize(
    ("collective", "name", "ranks", "node_size", "kind"),
    [
        ("all_reduce", "ring", 8, 8, "circle"),
        ("all_reduce", "double_tree", 8, 8, "trees"),
        ("all_reduce", "ring_2d", 16, 16, "grid"),
        ("all_reduce", "hierarchical", 16, 4, "circle"),
        ("broadcast", "binomial", 16, 16, "tree"),
        ("broadcast", "chain", 16, 16, "circle"),
        ("gather", "linear", 8, 8, "tree"),
    ],
)
def test_ranks_stand_as_they_talk(
    collective: str, name: str, ranks: int, node_size: int, kind: str
) -> None:
    schedule = find(collective, name).schedule(ranks, node_size=node_size)
    assert arrange(schedule, node_size).kind == kind


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 12])
def test_every_rank_has_a_place_of_its_own(ranks: int) -> None:
    for entry in catalog():
        schedule = entry.schedule(ranks, node_size=1)
        for place in arrange(schedule, 4).places:
            assert len(set(place.points)) == ranks, entry
            assert all(-1e-9 <= value <= 1 + 1e-9 for point in place.points for value in point)


def test_there_is_a_page_for_every_algorithm() -> None:
    for entry in catalog():
        text = schedule_page(entry.schedule(4, node_size=2, pieces=4))
        assert text.startswith("<!doctype html>")
        for outside in ("http://", "https://", " src=", "@import"):
            assert outside not in text.replace("http://www.w3.org/2000/svg", "")


def test_what_is_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match="too large for a page, which has room for 2,000,000"):
        schedule_page(find("all_reduce", "ring").schedule(2048))
    shown = find("all_reduce", "ring").schedule(2048)._repr_html_()
    assert "too large for a page" in shown
    assert "<iframe" not in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--against", "ring"], "--against needs --algorithm"),
        (["--html", "/nowhere/a.html"], "the folder of /nowhere/a.html does not exist"),
        (["--html", "a.html", "--algorithm", "rnig"], "all_reduce has no algorithm 'rnig', only"),
    ],
)
def test_the_command_refuses_in_a_sentence(arguments: list[str], said: str, tmp_path: Path) -> None:
    ran = CliRunner().invoke(main, ["plan", "all_reduce", "-n", "4", *arguments])
    assert ran.exit_code == 2
    assert said in ran.output
