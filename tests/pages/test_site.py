"""The documentation's site in a browser: search, links, players; it makes no external request."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import ChainMap
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from pages.browsing import start_browser, until

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site: DOCS_SITE names one that exists; otherwise it is built now."""
    pytest.importorskip("sphinx", reason="needs Sphinx: make docs")
    if "DOCS_SITE" in os.environ:
        return Path(os.environ["DOCS_SITE"])
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, ROOT / "tools/docs_site", "--output", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return folder


class Visit:
    """A page of the site in a browser. Requests outside the folder, and errors, are recorded."""

    def __init__(self, browser: Any, site: Path, scheme: str = "light", width: int = 1280) -> None:
        self.troubles: list[str] = []
        self.site = site
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page = context.new_page()
        self.page.on("console", lambda message: self._note(message.text, message.type == "error"))
        self.page.on("pageerror", lambda error: self._note(str(error)))
        self.page.on(
            "request",
            lambda request: self._note(
                request.url, not request.url.startswith((site.as_uri(), "data:", "blob:"))
            ),
        )

    def _note(self, what: str, is_trouble: bool = True) -> None:
        if is_trouble:
            self.troubles.append(what)

    def go(self, name: str) -> Any:
        self.page.goto(f"{self.site.as_uri()}/{name}")
        return self.page


@pytest.fixture
def visit(browser: Any, site: Path) -> Any:
    visit = Visit(browser, site)
    yield visit
    visit.page.context.close()
    assert visit.troubles == []


def test_search_finds_a_page_and_leads_there(visit: Visit) -> None:
    page = visit.go("index.html")
    page.get_by_role("textbox", name="Search").fill("reduce_scatter")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(r"search\.html"))
    until(page, "document.querySelectorAll('#search-results li a').length > 3")
    titles = page.locator("#search-results li a").all_inner_texts()
    assert any("unisono.reduce_scatter" in title for title in titles), titles
    until(page, "document.querySelectorAll('#search-results .summary').length > 3")
    page.locator("#search-results li a").first.click()
    assert "reduce_scatter" in page.locator("article").inner_text()


@pytest.mark.parametrize("words", ["uneven all_to_all", "split sizes", "variable sizes"])
def test_search_finds_uneven_parts(visit: Visit, words: str) -> None:
    page = visit.go(f"search.html?q={words.replace(' ', '+')}")
    until(page, "document.querySelectorAll('#search-results li a').length > 0")
    places = page.evaluate(
        "[...document.querySelectorAll('#search-results li a')].map(a => a.href)"
    )
    assert any("collectives.html" in place for place in places), places  # the page or the course


CUT = """() => [...document.querySelectorAll('.picture, .plots, .scroll, iframe, svg, img')]
  .filter((e) => e.getBoundingClientRect().right > innerWidth || e.scrollWidth > e.clientWidth + 1)
  .map((e) => e.outerHTML.slice(0, 80))"""


@pytest.mark.parametrize("name", ["index", "course-02-collectives", "performance", "architecture"])
def test_no_picture_is_cut_on_a_phone(browser: Any, site: Path, name: str) -> None:
    visit = Visit(browser, site, width=390)
    page = visit.go(f"{name}.html")
    assert page.locator("article :is(.picture, .plots, iframe)").count() > 0
    assert page.evaluate(CUT) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    visit.page.context.close()


CROWDED = (Path(__file__).parent / "crowded.js").read_text()
PALE = (Path(__file__).parent / "pale.js").read_text()
WIDTHS = (1280, 768, 390)


LONGEST_PX = 15_000
WRITTEN = {"diagnosis-corpus.html", "architecture.html"}
"""What a command writes, or is read from one end to the other."""


BROWSERS = 3


def find_crowded(site: Path, names: list[str]) -> dict[str, list[str]]:
    """What is wrong with these pages, in a browser of their own."""
    found = {}
    widths = WIDTHS
    with start_browser() as browser:
        visit = Visit(browser, site)
        for name in names:
            visit.page.set_viewport_size({"width": widths[0], "height": 900})
            page = visit.go(name)
            for width in widths:
                page.set_viewport_size({"width": width, "height": 900})
                crowded = page.evaluate(CROWDED)
                height = page.evaluate("document.documentElement.scrollHeight")
                if width == WIDTHS[0] and height > LONGEST_PX and name not in WRITTEN:
                    crowded.append(f"{height} px are too long")
                if crowded:
                    found[f"{name} at {width} px"] = crowded
            for scheme in ("dark", "light"):
                page.emulate_media(color_scheme=scheme)
                if pale := page.evaluate(PALE):
                    found[f"{name}, {scheme}"] = pale
            widths = widths[::-1]  # the next page opens as this one is: resizing takes long
            if visit.troubles:
                found[f"{name} reports"] = visit.troubles.copy()
                visit.troubles.clear()
    return found


@pytest.mark.usefixtures("browser")  # which skips, or says what is missing
def test_no_page_is_cut_and_none_is_endless(site: Path) -> None:
    names = [path.relative_to(site).as_posix() for path in sorted(site.rglob("*.html"))]
    names = [name for name in names if not name.startswith("_static")]
    shares = [names[first::BROWSERS] for first in range(BROWSERS)]
    with ThreadPoolExecutor(BROWSERS) as threads:
        found = dict(ChainMap(*threads.map(partial(find_crowded, site), shares)))
    assert found == {}


def test_crowded_pages_are_noticed(browser: Any) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 900})
    page.set_content(
        "<article><pre style='overflow: auto'>" + "x" * 200 + "</pre>"
        "<div style='width: 500px'>wide</div><p style='width: 20px; overflow: hidden'>unbroken</p>"
        "<svg><text y=20>one</text><text y=22>two</text></svg></article>"
    )
    found = page.evaluate(CROWDED)
    page.close()
    for what in ("wider than the window", "scrolls without", "cut: DIV", "cut: P", "labels"):
        assert any(what in one for one in found), (what, found)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pale_pages_are_noticed(browser: Any, scheme: str) -> None:
    page = browser.new_page(color_scheme=scheme)
    ink, paper = ("#eee", "#fff") if scheme == "light" else ("#222", "#111")
    block = "#000" if scheme == "light" else "#fff"
    page.set_content(
        f"<body style='background: {paper}'><article><p style='color: {ink}'>unread</p>"
        f"<svg width=90 height=90><rect width=90 height=90 fill='{block}'/></svg></article>"
    )
    found = page.evaluate(PALE)
    page.close()
    for what in ("pale: <p", "a block: <rect"):
        assert any(what in one for one in found), (what, found)


def test_the_start_page_answers_three_questions_at_first_sight(visit: Visit) -> None:
    """What it is, how to start, and where to go for a problem."""
    page = visit.go("index.html")
    lowest = page.evaluate("document.querySelector('.doors').getBoundingClientRect().bottom")
    assert lowest <= 900
    words = page.locator("article").inner_text()
    asked = ("pip install", "unisono demo", "hangs", "slow", "Tests", "Weights", "Serving")
    assert [word for word in (*asked, "Learning") if word not in words] == []


def test_the_ring_of_the_start_page_plays(visit: Visit) -> None:
    page = visit.go("index.html")
    inside = page.frame_locator("details.player iframe")
    inside.locator("html[data-ready]").wait_for(state="attached")
    page.locator("details.player").scroll_into_view_if_needed()
    until(page.frames[1], "player.time === player.duration", 60)


def test_every_link_leads_somewhere(visit: Visit, site: Path) -> None:
    """From the start page on, as the browser resolves each link, including its anchor."""
    todo, anchors, links = ["index.html"], {}, []
    while todo:
        name = todo.pop()
        if name in anchors:
            continue
        page = visit.go(name)
        anchors[name] = set(
            page.evaluate("[...document.querySelectorAll('[id]')].map(element => element.id)")
        )
        for link in page.evaluate("[...document.querySelectorAll('a[href]')].map(a => a.href)"):
            parts = urlsplit(link)
            if parts.scheme != "file":
                continue
            target = Path(unquote(parts.path))
            assert target.is_relative_to(site), f"{name}: {link}"
            assert target.is_file(), f"{name}: {link}"
            where = target.relative_to(site).as_posix()
            if where.endswith(".html") and not where.startswith("_static"):
                links.append((name, where, unquote(parts.fragment)))
                todo.append(where)
    assert len(anchors) > 40
    dead = [link for link in links if link[2] and link[2] not in anchors[link[1]]]
    assert dead == []
    pages = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    unseen = {page for page in pages if not page.startswith("_static")} - anchors.keys()
    assert unseen <= {"search.html", "genindex.html"}


def test_every_public_name_is_in_the_reference(visit: Visit) -> None:
    import unisono
    import unisono.plan
    import unisono.training

    for module, title in ((unisono, "unisono"), (unisono.plan, "unisono.plan"),
                          (unisono.training, "unisono.training")):  # fmt: skip
        own = [name for name in module.__all__ if not isinstance(getattr(module, name), ModuleType)]
        page = visit.go(f"reference/{title}.html")
        listed = page.locator("article td:first-child a").all_inner_texts()
        assert sorted(own) == sorted(listed)
        for name in own:
            source = (visit.site / f"reference/{title}.{name}.html").read_text()
            assert f'id="{title}.{name}"' in source


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pictures_can_be_read(browser: Any, site: Path, scheme: str) -> None:
    visit = Visit(browser, site, scheme)
    page = visit.go("collectives.html")
    assert page.locator(".picture svg.wide").count() == 9
    ink = page.locator(".picture text.value").first.evaluate("e => getComputedStyle(e).fill")
    is_dark_ink = sum(map(int, re.findall(r"\d+", ink)[:3])) < 380
    assert is_dark_ink == (scheme == "light")
    sums = page.locator(".picture").first.locator("text.value").all_text_contents()
    assert sums[-4:] == ["60", "64", "68", "72"]  # 0+10+20+30, 1+11+21+31, ...
    page = visit.go("tutorial.html")
    assert page.locator(".ranks .blamed td").first.inner_text() == "2"
    (waits,) = set(page.locator(".ranks .wait").all_inner_texts())
    assert re.fullmatch(r"all_reduce #4 late\.py:\d+, for rank 2", waits)
    visit.page.context.close()
    assert visit.troubles == []


def test_players_play_in_the_site(visit: Visit) -> None:
    from unisono.plan import catalog

    page = visit.go("schedules.html")
    frames = page.locator("details.player iframe")
    assert frames.count() == len(catalog())
    page.locator("details.player summary").first.click(position={"x": 5, "y": 5})
    inside = page.frame_locator("details.player iframe >> nth=0")
    inside.locator("[data-do=last]").click()
    assert inside.locator("[data-fact=done]").inner_text() == "100%"
