"""A run as a page to send to a colleague: which backend is faster and where, then the numbers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import geometric_mean

from unisono.bench import plot, text
from unisono.bench.results import Row, Run, to_json
from unisono.errors import name_number
from unisono.pages import as_data, build_page, escape

_LEFT = ("collective", "backend", "verdict")
ALIKE = 1.05
"""Times closer than this are called equal."""

_READING = """
<p>All backends ran in the same processes and on the same buffers, by turns. A figure is the median
over all samples, a sample the time of the slowest rank. Up to 64 KiB a sample is the mean of many
calls back to back after one barrier; above, one call after a barrier of its own. The result of
every backend was compared with the exact one before and after.</p>
<p>busbw is algbw times the factor of nccl-tests: 2(n-1)/n for all_reduce, 1 for broadcast, reduce
and messages, (n-1)/n for all others.</p>
<p>In the curves a band is the middle half of the samples, a dashed line what the model expected,
and the dotted line the floor: a local add or copy of the same bytes on all ranks at once. Nothing
that goes through memory can be much faster than the floor.</p>
<p>The model (latency, and a cost of a byte for each cache) was fitted to the rows marked
<i>calibrates</i>, and its expectation for the others was made before they were measured.</p>
"""


@dataclass(frozen=True)
class Duel:
    """The first backend and the fastest other one at one size of one collective."""

    first: Row
    other: Row

    @property
    def ratio(self) -> float:
        """How many times as fast the first one is."""
        return self.other.time_us.p50 / self.first.time_us.p50


def duels(run: Run) -> list[Duel]:
    """The first backend against the fastest other, where both were measured and correct."""
    found = []
    for rows in text.tables(run, run.rows):
        for size in dict.fromkeys(row.size_bytes for row in rows):
            here = [row for row in rows if row.size_bytes == size and not row.wrong]
            first = [row for row in here if row.backend == _first(run)]
            others = [row for row in here if row.backend != _first(run)]
            if first and others:
                found.append(Duel(first[0], min(others, key=lambda row: row.time_us.p50)))
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
    body = (
        _header(run, said)
        + _verdicts(run)
        + _overview(run)
        + _curves(run)
        + _figures(run)
        + _panel("How to read this", _READING + _columns())
        + _facts(run)
        + as_data("run", json.loads(to_json(run)))
        + '<p><button type="button" id="download">Download the data (JSON)</button> '
        '<span class="soft">for <code>unisono bench compare</code></span></p>'
    )
    return build_page(f"unisono bench: {said}", body, ("bench.css", "bench.js"))


def _panel(title: str, body: str, kind: str = "") -> str:
    return f'<section class="panel {kind}"><h2>{escape(title)}</h2>{body}</section>'


def _list(lines: Iterable[str], kind: str) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<ul class="{kind}">{items}</ul>' if items else ""


def _header(run: Run, said: str) -> str:
    parts = ["unisono bench", run.machine.get("date", ""), run.machine.get("host", "")]
    command = run.machine.get("command", "")
    return (
        f'<header><p class="kicker">{escape(" · ".join(part for part in parts if part))}</p>'
        f'<h1>{escape(said)}</h1><p class="soft">{escape(text.about(run))}</p>'
        + (f'<p><code class="command">{escape(command)}</code></p>' if command else "")
        + "</header>"
    )


def _verdicts(run: Run) -> str:
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
    return _panel(told[0], _list(lines, "notes"), f"verdicts {kind}")


def _overview(run: Run) -> str:
    """Collectives down, sizes across: how many times as fast the first backend is."""
    against = duels(run)
    sizes = sorted({duel.first.size_bytes for duel in against})
    if not any(sizes):
        return ""
    found: dict[str, dict[int, Duel]] = {}
    for duel in against:
        found.setdefault(duel.first.collective, {})[duel.first.size_bytes] = duel
    head = "".join(f"<th>{text.size_text(size)}</th>" for size in sizes)
    rows = "".join(
        f"<tr><th>{escape(name)}</th>{''.join(_ratio(of.get(size)) for size in sizes)}</tr>"
        for name, of in found.items()
    )
    return _panel(
        f"How many times as fast {against[0].first.backend} is as the fastest other",
        f'<div class="scroll"><table class="overview"><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>",
    )


def _ratio(duel: Duel | None) -> str:
    if duel is None:
        return "<td></td>"
    ratio = duel.ratio
    kind = "ahead" if ratio > ALIKE else "behind" if ratio < 1 / ALIKE else "even"
    strength = min(4, int((max(ratio, 1 / ratio) - 1) ** 0.5 * 2) + 1)
    ours, theirs = (text.time_text(row.time_us.p50) for row in (duel.first, duel.other))
    told = f"{ours} us, {duel.other.backend} {theirs} us"
    shown = text.ratio_text(ratio)
    return f'<td class="{kind} s{strength}" title="{escape(told)}">{shown}&times;</td>'


def _curves(run: Run) -> str:
    """Time and bandwidth over size, for each collective that has several sizes."""
    tables = [rows for rows in text.tables(run, run.rows) if plot.has_curves(rows)]
    if tables and not plot.is_available():
        install = f"<code>{escape(plot.INSTALL)}</code>"
        return f'<p class="panel">The curves need matplotlib: {install}</p>'
    key = [
        f'<li style="--colour:{plot.page_colour_of(name)}" class="backend">{escape(name)}</li>'
        for name in run.backends
    ]
    key += ['<li class="dashes">expected</li>', '<li class="dots">floor</li>']
    panels = [
        _panel(text.title(rows), f'<div class="charts">{plot.draw(rows)}</div>') for rows in tables
    ]
    return f'<div><ul class="key">{"".join(key)}</ul>{"".join(panels)}</div>' if panels else ""


def _figures(run: Run) -> str:
    """Every row, sortable by column and filtered by words."""
    columns = [("collective", "what was called")]
    columns += [(column.heading, column.meaning) for column in text.COLUMNS]
    heads = "".join(
        f'<th scope="col" title="{escape(meaning)}"{_class(name)}>'
        f'<button type="button">{escape(name)}</button></th>'
        for name, meaning in columns
    )
    lines = "".join(
        _line(row, text.first_of(rows, row)) for rows in text.tables(run, run.rows) for row in rows
    )
    return _panel(
        "Every figure",
        '<div class="filters"><input type="search" id="filter" '
        'placeholder="filter: gloo 64 KiB slow" aria-label="filter rows by words">'
        '<output id="count" class="soft"></output></div><div class="scroll tall">'
        f'<table id="figures"><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table></div>',
    )


def _line(row: Row, first: Row | None) -> str:
    kind = "wrong" if row.wrong else "slow" if row.verdict.startswith("slow") else ""
    cells = [f'<td class="left collective">{escape(row.collective)}</td>']
    for column, (value, shown) in zip(text.COLUMNS, text.cells(row, first), strict=True):
        number = f' data-value="{value:.6g}"' if isinstance(value, (int, float)) else ""
        dot = ""
        if column.heading == "backend":
            dot = f'<i style="--colour:{plot.page_colour_of(row.backend)}"></i>'
        cells.append(f"<td{_class(column.heading)}{number}>{dot}{escape(shown)}</td>")
    return f'<tr class="{kind}">{"".join(cells)}</tr>'


def _class(heading: str) -> str:
    left = "left " if heading in _LEFT else ""
    return f' class="{left}{heading.replace(" ", "-").strip("#")}"'


def _columns() -> str:
    items = (
        f"<dt>{escape(column.heading)}</dt><dd>{escape(column.meaning)}</dd>"
        for column in text.COLUMNS
    )
    return f"<details><summary>The columns</summary><dl>{''.join(items)}</dl></details>"


def _facts(run: Run) -> str:
    facts = run.machine | {f"{name} version": value for name, value in run.versions.items()}
    facts |= {f"setting {name}": value for name, value in run.settings.items()}
    lines = (
        f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in facts.items()
    )
    return (
        '<details class="panel"><summary>The machine and the settings</summary>'
        f'<div class="scroll"><table>{"".join(lines)}</table></div></details>'
    )
