"""Animated schedules in a browser: what the page shows at the end is the schedule's result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pages.browsing import OpenPage, until
from unisono.plan import PRESETS, Schedule, catalog, find, simulate, verify
from unisono.plan.player import schedule_frame, schedule_page
from unisono.plan.proof import holds_after, holds_before


def ready(page: Any) -> Any:
    page.wait_for_selector("html[data-ready]")
    return page


def held_at_the_end(schedule: Schedule) -> list[list[int]]:
    """How many ranks' contributions each chunk of each rank has after the last step, computed with
    sets."""
    held: list[dict[int, frozenset[int]]] = [
        {chunk: frozenset([rank]) for chunk in holds_before(schedule, rank)}
        for rank in range(schedule.ranks)
    ]
    for step in schedule.steps:
        before = [dict(of) for of in held]
        for transfer in step:
            for chunk in range(transfer.chunk, transfer.chunk + transfer.count):
                sent = before[transfer.source][chunk]
                if transfer.action == "reduce":
                    sent = sent | held[transfer.destination][chunk]
                held[transfer.destination][chunk] = sent
    return [[len(of.get(chunk, ())) for chunk in range(schedule.chunks)] for of in held]


def shown(page: Any, part: int = 0) -> list[list[int]]:
    counts: list[list[int]] = page.evaluate(
        "at => { const model = player.parts[at].model;"
        " return Array.from({length: model.ranks}, (_, rank) => Array.from("
        "   model.held.subarray(rank * model.chunks, (rank + 1) * model.chunks),"
        "   (value) => model.values.count[value])); }",
        part,
    )
    return counts


def fact(page: Any, name: str, part: int = 0) -> str:
    text: str = page.locator(".part").nth(part).locator(f"[data-fact={name}]").inner_text()
    return text


ENTRIES = [pytest.param(entry, id=f"{entry.collective}-{entry.name}") for entry in catalog()]


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_end_is_what_verify_proves(entry: Any, open_page: OpenPage) -> None:
    schedule = entry.schedule(6, node_size=3, pieces=2, root=2)
    verify(schedule)
    page = ready(open_page(schedule_page(schedule, PRESETS["h100"].with_nodes_of(3))))
    assert fact(page, "done") != "100%"
    page.keyboard.press("End")
    assert shown(page) == held_at_the_end(schedule)
    assert fact(page, "done") == "100%"
    assert fact(page, "step") == f"{schedule.rounds} of {schedule.rounds}"
    page.keyboard.press("Home")
    begin = [len(holds_before(schedule, rank)) for rank in range(schedule.ranks)]
    assert [sum(map(bool, counts)) for counts in shown(page)] == begin


def test_plays_to_its_end_and_stops(open_page: OpenPage) -> None:
    schedule = find("all_reduce", "double_tree").schedule(8, pieces=2)
    page = ready(open_page(schedule_page(schedule)))
    page.get_by_label("speed").select_option("8")
    page.locator("[data-do=play]").click()
    until(page, "player.isPlaying && player.time > 0")
    until(page, "!player.isPlaying")
    assert page.evaluate("player.time === player.duration")
    assert shown(page) == [[8] * schedule.chunks] * 8
    page.locator("[data-do=play]").click()  # once more, from the beginning
    until(page, "player.isPlaying && player.time < player.duration")


def test_is_paused_stepped_scrubbed_and_hurried_by_keyboard(open_page: OpenPage) -> None:
    schedule = find("all_reduce", "ring").schedule(4)
    page = ready(open_page(schedule_page(schedule)))
    for step in (1, 2, 3):
        page.keyboard.press("ArrowRight")
        assert fact(page, "step") == f"{step} of 6"
    page.keyboard.press("ArrowLeft")
    assert fact(page, "step") == "2 of 6"
    page.keyboard.press("+")
    assert page.get_by_label("speed").input_value() == "2"
    page.keyboard.press("-")
    page.keyboard.press("Space")
    until(page, "player.isPlaying")
    page.keyboard.press("Space")
    until(page, "!player.isPlaying")
    page.get_by_role("slider").fill("10000")
    assert fact(page, "done") == "100%"
    page.get_by_role("slider").fill("0")
    assert shown(page) == [[1] * 4] * 4


def test_the_clock_is_the_simulations(open_page: OpenPage) -> None:
    schedule = find("all_reduce", "ring").schedule(8)
    expected = simulate(schedule, PRESETS["h100"], 64 << 20).time_s
    page = ready(open_page(schedule_page(schedule)))
    assert page.evaluate("player.duration") == pytest.approx(expected, rel=1e-6)
    ends = page.evaluate("player.parts[0].model.stepEnds")
    assert len(ends) == 14
    assert ends[-1] == pytest.approx(expected, rel=1e-6)


def test_two_schedules_share_one_clock(open_page: OpenPage) -> None:
    ring, tree = (find("all_reduce", name).schedule(8) for name in ("ring", "double_tree"))
    page = ready(open_page(schedule_page([ring, tree])))
    times = [simulate(schedule, PRESETS["h100"], 64 << 20).time_s for schedule in (ring, tree)]
    first, last = sorted((0, 1), key=lambda part: times[part])
    page.evaluate("time => player.jump(time)", min(times) * 1.0001)
    assert fact(page, "done", first) == "100%"
    assert fact(page, "done", last) != "100%"
    page.keyboard.press("End")
    assert fact(page, "done", last) == "100%"
    assert page.evaluate("player.duration") == pytest.approx(max(times), rel=1e-6)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("ranks", [4, 256])
@pytest.mark.parametrize("width", [390, 1280])
def test_is_drawn_at_every_size(ranks: int, width: int, scheme: str, open_page: OpenPage) -> None:
    schedule = find("all_reduce", "ring").schedule(ranks)
    page = ready(open_page(schedule_page(schedule), width=width, scheme=scheme))
    page.evaluate("player.jump(player.duration * 0.5)")
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, paper[4:-1].split(","))) > 380) == (scheme == "light")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    for canvas in page.locator("canvas").all():
        colours = canvas.evaluate(
            "canvas => { const {width, height} = canvas;"
            " const data = new Uint32Array("
            "   canvas.getContext('2d').getImageData(0, 0, width, height).data.buffer);"
            " return new Set(data).size; }"
        )
        assert colours > 5  # something is drawn
    box = page.locator("[data-do=play]").bounding_box()
    assert min(box["width"], box["height"]) >= 40  # by touch


def test_a_finger_says_what_a_buffer_holds(open_page: OpenPage) -> None:
    page = ready(open_page(schedule_page(find("all_reduce", "ring").schedule(4)), width=390))
    page.keyboard.press("ArrowRight")
    counts = shown(page)
    rank, chunk = next(
        (rank, chunk) for rank in range(4) for chunk in range(4) if counts[rank][chunk] == 2
    )
    x, y = page.evaluate(
        "([rank, chunk]) => { const of = player.parts[0].buffers;"
        " return [of.left + of.column * (rank + .5), of.top + of.row * (chunk + .5)]; }",
        [rank, chunk],
    )
    page.locator("canvas.buffers").tap(position={"x": x, "y": y})
    low, high = sorted([(rank - 1) % 4, rank])
    expected = f"rank {rank}, chunk {chunk}: from ranks {low}, {high}"
    until(page, f"document.querySelector('.tip').textContent === {expected!r}")


def test_plays_in_a_notebook(open_page: OpenPage) -> None:
    schedule = find("broadcast", "binomial").schedule(8)
    assert schedule._repr_html_() == schedule_frame(schedule)
    page = open_page(f"<!doctype html><title>notebook</title>{schedule_frame(schedule)}")
    inside = page.frame_locator("iframe")
    inside.locator("[data-do=last]").click()
    assert inside.locator("[data-fact=done]").inner_text() == "100%"


def test_what_every_rank_must_have_is_marked(open_page: OpenPage) -> None:
    schedule = find("reduce_scatter", "ring").schedule(4)
    page = ready(open_page(schedule_page(schedule)))
    page.keyboard.press("End")
    counts = shown(page)
    for rank in range(4):
        for chunk in holds_after(schedule, rank):
            assert counts[rank][chunk] == 4
    assert page.locator(".part.is-done").count() == 1


def test_the_command_writes_the_page(open_page: OpenPage, tmp_path: Path) -> None:
    from click.testing import CliRunner

    from unisono.cli import main

    file = tmp_path / "play.html"
    arguments = ["plan", "all_reduce", "-n", "8", "--algorithm", "ring"]
    ran = CliRunner().invoke(main, [*arguments, "--against", "double_tree", "--html", str(file)])
    assert ran.exit_code == 0, ran.output
    page = ready(open_page(file))
    assert page.locator("h1").inner_text() == "all_reduce by ring and double_tree"
    assert page.locator(".part").count() == 2
