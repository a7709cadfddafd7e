"""A run as a page to send to a colleague: who is faster and where, then the figures, then how."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from unisono.bench import text
from unisono.bench.charts import colour_of, draw_charts
from unisono.bench.collectives import COLLECTIVES
from unisono.bench.compare import compare, describe_change
from unisono.bench.headline import Duel, duels, headline, highlights
from unisono.bench.results import Row, Run, to_json
from unisono.errors import name_number
from unisono.pages import as_data, build_page, escape

_LEFT = ("collective", "backend", "verdict")
_MOST_CHANGES = 12

_READING = """
<p>All backends ran in the same processes and on the same buffers, by turns. A figure is the median
over all samples, a sample the time of the slowest rank. Up to 64 KiB a sample is the mean of many
calls back to back after one barrier; above, one call after a barrier of its own. The result of
every backend was compared with the exact one before and after.</p>
<p>In the curves a band is the middle half of the samples, a dashed line what the model expected,
and the dotted line the floor: a local add or copy of the same bytes on all ranks at once. Nothing
that goes through memory can be much faster than the floor.</p>
<p>The model (latency, and a cost of a byte for each cache) was fitted to the rows marked
<i>calibrates</i>, and its expectation for the others was made before they were measured.</p>
"""


def page(run: Run, old: Run | None = None) -> str:
    """The page of a run; with `old`, what has changed since that one, too."""
    tables = text.tables(run, run.rows)
    backends = list(dict.fromkeys(row.backend for row in run.in_order))
    body = (
        f"<header>{_kicker(run)}<h1>{escape(headline(run))}</h1>"
        f"{_list(highlights(run), 'highlights')}{_origin(run)}</header>"
        + _verdicts(run)
        + (_changes(old, run) if old is not None else "")
        + _overview(run)
        + f"<div>{_legend(backends, old is not None)}"
        + "".join(_curves(rows, old) for rows in tables)
        + "</div>"
        + _figures(run, backends)
        + f'<section class="panel"><h2>How to read this</h2>{_READING}{_columns()}{_factors(run)}'
        + f"</section>{_models(run)}{_facts(run)}"
        + as_data("run", json.loads(to_json(run)))
        + '<p><button type="button" id="download">Download the data (JSON)</button> '
        '<span class="soft">for <code>unisono bench compare</code></span></p>'
    )
    return build_page(f"unisono bench: {headline(run)}", body, ("bench.css", "bench.js"))


def _kicker(run: Run) -> str:
    parts = ["unisono bench", run.machine.get("date", ""), run.machine.get("host", "")]
    return f'<p class="kicker">{escape(" · ".join(part for part in parts if part))}</p>'


def _origin(run: Run) -> str:
    command = run.machine.get("command", "")
    shown = f'<p><code class="command">{escape(command)}</code></p>' if command else ""
    return f'<p class="soft">{escape(text.about(run))}</p>{shown}'


def _list(lines: Iterable[str], kind: str) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<ul class="{kind}">{items}</ul>' if items else ""


def _verdicts(run: Run) -> str:
    """What to worry about first; then what could not be measured."""
    judged = [row for row in run.rows if row.expected_us is not None]
    slow = sum(row.verdict.startswith("slow") for row in judged)
    kind = "wrong" if run.wrong else "slow" if slow or not run.finished else "well"
    if run.wrong:
        title = "Wrong results"
    elif slow:
        times = name_number(len(judged), "time")
        title = f"Every result was exact; {slow} of {times} slower than expected"
    else:
        title = "Every result was exact, and no time was slower than expected"
    left_out = [str(skipped) for skipped in run.skipped if ": " not in skipped.what]
    return (
        f'<section class="panel verdicts {kind}"><h2>{escape(title)}</h2>'
        f"{_list([*text.verdicts(run), *left_out, *text.model_notes(run)], 'notes')}</section>"
    )


def _changes(old: Run, new: Run) -> str:
    comparison = compare(old, new)
    counts = " · ".join(
        f"{len(comparison.of_kind(kind))} {kind}"
        for kind in ("wrong", "slower", "faster", "same", "noise")
    )
    items = []
    for kind in ("wrong", "slower", "faster"):
        changes = comparison.of_kind(kind)
        items += [
            f'<li class="{kind}"><b>{kind}</b> {escape(describe_change(change))}</li>'
            for change in changes[:_MOST_CHANGES]
        ]
        if len(changes) > _MOST_CHANGES:
            items.append(f"<li>and {len(changes) - _MOST_CHANGES} more are {kind}</li>")
    when = old.machine.get("date", "an older run")
    shown = f'<ul class="changes">{"".join(items)}</ul>' if items else "<p>Nothing changed.</p>"
    return (
        f'<section class="panel"><h2>Since {escape(when)}</h2><p class="soft">{escape(counts)}</p>'
        f"{shown}</section>"
    )


def _overview(run: Run) -> str:
    """Collectives down, sizes across: how many times as fast the first backend is."""
    against = duels(run)
    sizes = sorted({duel.first.size_bytes for duel in against if duel.first.size_bytes})
    if not sizes:
        return ""
    found: dict[str, dict[int, Duel]] = {}
    for duel in against:
        place = "" if duel.first.placement != "out" else " (out of place)"
        name = duel.first.collective + (place if _has_both(run, duel.first) else "")
        found.setdefault(name, {})[duel.first.size_bytes] = duel
    head = "".join(f"<th>{text.size_text(size)}</th>" for size in sizes)
    rows = "".join(
        f"<tr><th>{escape(name)}</th>"
        + "".join(
            _ratio(of.get(size) or (of.get(0) if size == sizes[0] else None)) for size in sizes
        )
        + "</tr>"
        for name, of in found.items()
    )
    first = against[0].first.backend
    return (
        f'<section class="panel"><h2>How many times as fast {escape(first)} is as the fastest '
        f'other</h2><div class="scroll"><table class="overview"><thead><tr><th></th>{head}</tr>'
        f"</thead><tbody>{rows}</tbody></table></div></section>"
    )


def _has_both(run: Run, row: Row) -> bool:
    return len({other.placement for other in run.rows if other.collective == row.collective}) > 1


def _ratio(duel: Duel | None) -> str:
    if duel is None:
        return "<td></td>"
    ratio = duel.ratio
    kind = "ahead" if ratio > 1.05 else "behind" if ratio < 0.95 else "even"
    strength = min(4, int(abs(ratio - 1 if ratio > 1 else 1 / ratio - 1) ** 0.5 * 2) + 1)
    told = f"{text.time_text(duel.first.time_us.p50)} us, {duel.other.backend} "
    told += f"{text.time_text(duel.other.time_us.p50)} us"
    shown = f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"
    return f'<td class="{kind} s{strength}" title="{escape(told)}">{shown}&times;</td>'


def _legend(backends: Sequence[str], has_old: bool) -> str:
    items = [
        f'<li style="--colour:{colour_of(name)}" class="backend">{escape(name)}</li>'
        for name in backends
    ]
    items += ['<li class="dashes">expected</li>', '<li class="dots">floor</li>']
    items += ['<li class="thin">the older run</li>'] if has_old else []
    return f'<ul class="key">{"".join(items)}</ul>'


def _curves(rows: Sequence[Row], old: Run | None) -> str:
    first = rows[0]
    before = [
        row
        for row in (old.in_order if old is not None else ())
        if (row.collective, row.placement) == (first.collective, first.placement)
    ]
    drawn = draw_charts(rows, before)
    return (
        f'<section class="panel"><h2>{escape(text.title(rows))}</h2>{drawn}</section>'
        if drawn
        else ""
    )


def _figures(run: Run, backends: Sequence[str]) -> str:
    """Every row, to be sorted by a column and filtered by words."""
    heads = "".join(
        f'<th scope="col" title="{escape(meaning)}"{_class(name)}>'
        f'<button type="button">{escape(name)}</button></th>'
        for name, meaning in (
            ("collective", "what was called"),
            *((column.heading, column.meaning) for column in text.COLUMNS),
        )
    )
    lines = "".join(
        _line(row, text.first_of(rows, row)) for rows in text.tables(run, run.rows) for row in rows
    )
    names = list(dict.fromkeys(row.collective for row in run.in_order))
    return (
        '<section class="panel"><h2>Every figure</h2><div class="filters">'
        '<input type="search" id="filter" placeholder="filter: gloo 64 KiB slow" '
        f'aria-label="filter rows by words">{_select("collective", names)}'
        f'{_select("backend", backends)}<output id="count" class="soft"></output></div>'
        f'<div class="scroll tall"><table id="figures"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div></section>"
    )


def _select(what: str, names: Sequence[str]) -> str:
    options = "".join(f"<option>{escape(name)}</option>" for name in names)
    return (
        f'<select data-column="{what}" aria-label="{what}"><option value="">every {what}</option>'
        f"{options}</select>"
    )


def _line(row: Row, first: Row | None) -> str:
    kind = "wrong" if row.wrong else "slow" if row.verdict.startswith("slow") else ""
    exact = [
        row.size_bytes,
        row.count,
        "",
        row.time_us.p50,
        row.time_us.p95,
        row.time_us.spread,
        row.skew_us,
        row.algbw,
        row.busbw,
        row.wrong,
        row.expected_us,
        "",
        row.time_us.p50 / row.floor_us if row.floor_us else None,
        row.time_us.p50 / first.time_us.p50 if first else None,
    ]
    cells = [f'<td class="left collective">{escape(row.collective)}</td>']
    for column, shown, value in zip(text.COLUMNS, text.cells(row, first), exact, strict=True):
        number = "" if value in ("", None) else f' data-value="{value:.6g}"'
        dot = (
            f'<i style="--colour:{colour_of(row.backend)}"></i>'
            if column.heading == "backend"
            else ""
        )
        cells.append(f"<td{_class(column.heading)}{number}>{dot}{escape(shown)}</td>")
    return f'<tr class="{kind}" data-backend="{escape(row.backend)}">{"".join(cells)}</tr>'


def _class(heading: str) -> str:
    names = [*(["left"] if heading in _LEFT else []), heading.replace(" ", "-").strip("#")]
    return f' class="{" ".join(names)}"'


def _columns() -> str:
    items = (
        f"<dt>{escape(column.heading)}</dt><dd>{escape(column.meaning)}</dd>"
        for column in text.COLUMNS
    )
    return f"<details><summary>The columns</summary><dl>{''.join(items)}</dl></details>"


def _factors(run: Run) -> str:
    names = dict.fromkeys(row.collective for row in run.in_order)
    items = (f"<li>{name}: {escape(COLLECTIVES[name].factor)}</li>" for name in names)
    return (
        "<details><summary>busbw / algbw, n ranks, as in nccl-tests</summary>"
        f"<ul>{''.join(items)}</ul></details>"
    )


def _models(run: Run) -> str:
    if not run.models:
        return ""
    lines = []
    for model in run.models:
        regimes = ", ".join(f"{text.size_text(size)}: {rate:.2f}" for size, rate in model.regimes)
        lines.append(
            f"<tr><td>{escape(model.backend)}</td><td>{escape(model.collective)}</td>"
            f"<td>{text.time_text(model.latency_us)}</td><td>{regimes}</td></tr>"
        )
    return (
        '<details class="panel"><summary>The model</summary><div class="scroll"><table><tr>'
        "<th>backend</th><th>collective</th><th>latency us</th>"
        f"<th>GB/s by size</th></tr>{''.join(lines)}</table></div></details>"
    )


def _facts(run: Run) -> str:
    both = {**run.machine, **{f"{name} version": value for name, value in run.versions.items()}}
    both |= {f"setting {name}": value for name, value in run.settings.items()}
    lines = (
        f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in both.items()
    )
    return (
        '<details class="panel"><summary>The machine and the settings</summary>'
        f'<div class="scroll"><table>{"".join(lines)}</table></div></details>'
    )
