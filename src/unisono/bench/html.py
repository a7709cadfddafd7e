"""A run as a page to send to a colleague: which backend is faster and where, then the numbers."""

import itertools
import json
from statistics import geometric_mean
from typing import NamedTuple

from unisono.bench import plot, text
from unisono.bench.results import Row, Run, by_collective, by_size, to_json
from unisono.errors import name_number
from unisono.show import charts
from unisono.show.pages import Html, asset, build_page, data, element, elements, panel, table
from unisono.show.table import Column, name_of

ALIKE = 1.05
"""Times closer than this are called equal."""

_DOWNLOAD = Html(
    '<p><button type="button" id="download">Download the data (JSON)</button> '
    '<span class="soft">for <code>unisono bench compare</code></span></p>'
)
_FILTERS = Html(
    '<div class="filters"><input type="search" id="filter" '
    'placeholder="filter: gloo 64 KiB slow" aria-label="filter rows by words">'
    '<output id="count" class="soft"></output></div>'
)


class Duel(NamedTuple):
    """The first backend and the fastest other one at one size of one collective."""

    first: Row
    other: Row
    ratio: float
    """How many times as fast the first one is."""


def duels(run: Run) -> list[Duel]:
    """The first backend against the fastest other, where both were measured and correct."""
    found: list[Duel] = []
    for of_size in itertools.chain.from_iterable(map(by_size, by_collective(run.rows))):
        right = sorted((row for row in of_size if not row.wrong), key=lambda row: row.time_us.p50)
        first = [row for row in right if row.backend == _first(run)]
        others = [row for row in right if row.backend != _first(run)]
        for one, other in zip(first[:1], others[:1], strict=False):
            found.append(Duel(one, other, other.time_us.p50 / one.time_us.p50))
    return found


def headline(run: Run) -> str:
    against = duels(run)
    if not against:
        names = ", ".join(run.backends) or "Nothing"
        return f"{names}: {name_number(len(run.rows), 'measurement')}"
    first, *rivals = sorted(run.backends, key=lambda name: (name != _first(run), name))
    others = rivals[0]
    if len(rivals) > 1:
        degree = "faster" if len(rivals) == 2 else "fastest"
        others = f"the {degree} of {', '.join(rivals[:-1])} and {rivals[-1]}"
    mean = geometric_mean([duel.ratio for duel in against])
    won = sum(duel.ratio > 1 for duel in against)
    if 1 / ALIKE < mean < ALIKE:
        how = f"{first} and {others} are equally fast on average"
    elif mean > 1:
        how = f"{first} is {text.ratio_text(mean)} times as fast as {others} on average"
    else:
        how = f"{first} takes {text.ratio_text(1 / mean)} times as long as {others} on average"
    busy = ", on a busy machine" if any(row.disturbed for row in run.rows) else ""
    return f"{how}, and ahead in {won} of {name_number(len(against), 'row')}{busy}"


def _first(run: Run) -> str:
    """The first backend that was asked for and measured."""
    asked = run.settings.get("backends", [])
    return next((name for name in asked if name in run.backends), next(iter(run.backends), ""))


def page(run: Run) -> str:
    said = headline(run)
    parts = ["unisono bench", run.machine.get("date", ""), run.machine.get("host", "")]
    lines = [
        element("p", " · ".join(part for part in parts if part), class_="kicker"),
        element("h1", said),
        element("p", text.about(run), class_="soft"),
    ]
    if command := run.machine.get("command", ""):
        lines.append(element("p", element("code", command, class_="command")))
    body = (
        element("header", *lines),
        _verdicts(run),
        _overview(run),
        _curves(run),
        _figures(run),
        panel("How to read this", asset("bench.html")),
        data("run", json.loads(to_json(run))),
        _DOWNLOAD,
    )
    return build_page(f"unisono bench: {said}", body, ("bench.css", "bench.js"))


def _verdicts(run: Run) -> Html:
    """Problems first; then what could not be measured."""
    judged = [row for row in run.rows if row.expected_us is not None]
    slow = sum(row.verdict.startswith("slow") for row in judged)
    disturbed = sum(row.disturbed for row in run.rows)
    kind = "well" if judged else ""
    if slow or disturbed or not run.finished:
        kind = "slow"
    times = name_number(len(judged), "time")
    has_results = any(row.count for row in run.rows)
    told = ["Every result was exact" if has_results else "No result to check"]
    if slow:
        told[0] += f"; {slow} of {times} slower than expected"
    elif judged:
        told[0] += f", and of {times} with an expected value none was slower"
    else:
        told[0] += "; too few sizes to say whether a time is as expected"
    if disturbed:
        rows = name_number(len(run.rows), "row")
        told.insert(0, f"The machine was busy: other programs disturbed {disturbed} of {rows}")
    if run.wrong:
        kind, told = "wrong", ["Wrong results", *told[:-1]]
    left_out = [str(skipped) for skipped in run.skipped if " " not in skipped.what]
    lines = [*told[1:], *text.verdicts(run), *left_out, *text.model_notes(run)]
    notes = element("ul", elements("li", lines), class_="notes") if lines else ""
    return panel(told[0], notes, kind=f"verdicts {kind}")


def _overview(run: Run) -> str:
    """Collectives down, sizes across: how many times as fast the first backend is."""
    against = duels(run)
    sizes = sorted({duel.first.size_bytes for duel in against})
    if not any(sizes):
        return ""
    found: dict[str, dict[int, Duel]] = {}
    for duel in against:
        found.setdefault(duel.first.collective, {})[duel.first.size_bytes] = duel
    rows = (
        element("tr", element("th", name), *(_ratio(of.get(size)) for size in sizes))
        for name, of in found.items()
    )
    heads = elements("th", ["", *map(text.size_text, sizes)])
    title = f"How many times as fast {against[0].first.backend} is as the fastest other"
    return panel(title, table([heads], rows, class_="overview"))


def _ratio(duel: Duel | None) -> Html:
    if duel is None:
        return element("td")
    ratio = duel.ratio
    kind = "ahead" if ratio > ALIKE else "behind" if ratio < 1 / ALIKE else "even"
    strength = min(4, int((max(ratio, 1 / ratio) - 1) ** 0.5 * 2) + 1)
    ours, theirs = (text.time_text(row.time_us.p50) for row in duel[:2])
    told = f"{ours} us, {duel.other.backend} {theirs} us"
    times = Html(f"{text.ratio_text(ratio)}&times;")
    return element("td", times, class_=f"{kind} s{strength}", title=told)


def _curves(run: Run) -> str:
    """Time and bandwidth over size, for each collective that has several sizes."""
    several = [rows for rows in by_collective(run.rows) if plot.has_curves(rows)]
    if not several:
        return ""
    if not charts.is_available():
        install = element("code", charts.INSTALL)
        return element("p", "The curves need matplotlib: ", install, class_="panel")
    key = [
        element("li", name, style=f"--colour:{plot.page_colour_of(name)}", class_="backend")
        for name in run.backends
    ]
    key += [element("li", "expected", class_="dashes"), element("li", "floor", class_="dots")]
    panels = (
        panel(text.title(rows), element("div", plot.draw(rows), class_="charts"))
        for rows in several
    )
    return element("div", element("ul", *key, class_="key"), *panels)


def _figures(run: Run) -> Html:
    """Every row, sortable by column and filtered by words."""
    columns = [Column("<collective", meaning="what was called"), *text.COLUMNS]
    heads = (
        element(
            "th",
            element("button", name_of(column.heading), type="button"),
            scope="col",
            title=column.meaning,
            class_=_class(column),
        )
        for column in columns
    )
    lines = (
        _line(row, of_size[0])
        for rows in by_collective(run.rows)
        for of_size in by_size(rows)
        for row in of_size
    )
    figures = table(heads, lines, kind="scroll tall", id="figures")
    return panel("Every figure", _FILTERS, figures)


def _line(row: Row, first: Row) -> Html:
    kind = "wrong" if row.wrong else "slow" if row.verdict.startswith("slow") else ""
    cells = [element("td", row.collective, class_="left collective")]
    for column, (value, shown) in zip(text.COLUMNS, text.cells(row, first), strict=True):
        number = f"{value:.6g}" if isinstance(value, (int, float)) else None
        is_backend = column.heading == "<backend"
        dot = element("i", style=f"--colour:{plot.page_colour_of(row.backend)}")
        parts = (dot, shown) if is_backend else (shown,)
        cells.append(element("td", *parts, class_=_class(column), data_value=number))
    return element("tr", *cells, class_=kind)


def _class(column: Column) -> str:
    left = "left " if column.heading.startswith("<") else ""
    return left + name_of(column.heading).replace(" ", "-").strip("#")
