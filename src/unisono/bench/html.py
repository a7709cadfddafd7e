"""A run as one HTML file with the plots, the tables, the machine, and how to read them."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from unisono.bench import plot, text
from unisono.bench.collectives import COLLECTIVES
from unisono.bench.results import Row, Run
from unisono.errors import UnisonoError

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2em; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { padding: 2px 9px; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th { border-bottom: 2px solid #888; } .left { text-align: left; }
tr.wrong { background: #fbd5d5; font-weight: bold; } tr.slow td.verdict { color: #b04a00; }
.scroll { overflow-x: auto; } svg { max-width: 100%; height: auto; }
dt { font-weight: bold; } dd { margin: 0 0 .4em 1.5em; } .warning { color: #a00; }
"""
_LEFT = ("backend", "verdict")

_READING = """
<p>All backends ran in the same processes and on the same buffers, by turns. A figure is the median
over all samples, a sample the time of the slowest rank. Up to 64 KiB a sample is the mean of many
calls back to back after one barrier; above, one call after a barrier of its own. The result of
every backend was compared with the exact one before and after.</p>
<p>In the plots a band is the middle half of the samples, a dashed line what the model expected, and
the dotted line the floor: a local add or copy of the same bytes on all ranks at once. Nothing that
goes through memory can be much faster than the floor.</p>
<p>The model (latency, and a cost of a byte for each cache) was fitted to the rows marked
<i>calibrates</i>, and its expectation for the others was made before they were measured.</p>
"""


def page(run: Run) -> str:
    """The page. Without matplotlib it says how to get the plots, and has the rest."""
    try:
        pictures = dict(plot.svg(run))
        missing = ""
    except UnisonoError as error:
        pictures, missing = {}, f"<p class=warning>{escape(str(error))}</p>"
    sections = [
        f"<h2>{escape(text.title(rows))}</h2>{pictures.get(text.title(rows), '')}{_table(rows)}"
        for rows in text.tables(run, run.rows)
    ]
    notes = "".join(f"<li>{escape(line)}</li>" for line in text.summary(run))
    left_out = "".join(
        f"<li>{escape(str(skipped))}</li>" for skipped in run.skipped if ": " not in skipped.what
    )
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<title>unisono bench</title><style>{_STYLE}</style></head><body>"
        f"<h1>unisono bench</h1><p>{escape(text.about(run))}</p>"
        f"<ul>{notes}{left_out}</ul>{missing}"
        f"<h2>How to read this</h2>{_READING}{_columns()}{_factors(run)}"
        f"{''.join(sections)}{_models(run)}{_facts(run)}</body></html>\n"
    )


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


def _table(rows: Sequence[Row]) -> str:
    heads = "".join(
        f"<th{_class(column.heading)} title='{escape(column.meaning, quote=True)}'>"
        f"{escape(column.heading)}</th>"
        for column in text.COLUMNS
    )
    lines = "".join(_line(rows, row) for row in rows)
    return f"<div class=scroll><table><tr>{heads}</tr>{lines}</table></div>"


def _line(rows: Sequence[Row], row: Row) -> str:
    kind = "wrong" if row.wrong else "slow" if row.verdict.startswith("slow") else ""
    values = zip(text.COLUMNS, text.cells(row, text.first_of(rows, row)), strict=True)
    inner = "".join(f"<td{_class(column.heading)}>{escape(value)}</td>" for column, value in values)
    return f"<tr class='{kind}'>{inner}</tr>"


def _class(heading: str) -> str:
    names = [*(["left"] if heading in _LEFT else []), heading.replace(" ", "-").strip("#")]
    return f" class='{' '.join(names)}'"


def _models(run: Run) -> str:
    if not run.models:
        return ""
    lines = []
    for model in run.models:
        regimes = ", ".join(f"{text.size_text(size)}: {rate:.2f}" for size, rate in model.regimes)
        lines.append(
            f"<tr><td class=left>{escape(model.backend)}</td><td class=left>{model.collective}</td>"
            f"<td>{text.time_text(model.latency_us)}</td><td class=left>{regimes}</td></tr>"
        )
    return (
        "<h2>The model</h2><div class=scroll><table><tr><th class=left>backend</th>"
        "<th class=left>collective</th><th>latency us</th>"
        f"<th class=left>GB/s by size</th></tr>{''.join(lines)}</table></div>"
    )


def _facts(run: Run) -> str:
    both = {**run.machine, **{f"{name} version": value for name, value in run.versions.items()}}
    both |= {f"setting {name}": value for name, value in run.settings.items()}
    lines = (
        f"<tr><td class=left>{escape(name)}</td><td class=left>{escape(str(value))}</td></tr>"
        for name, value in both.items()
    )
    return f"<h2>The machine and the settings</h2><table>{''.join(lines)}</table>"
