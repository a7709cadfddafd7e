"""A table for a notebook: plain HTML without scripts, in the notebook's own colours."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from unisono.pages.page import escape

MOST_ROWS = 100


def html_table(
    heads: Sequence[str],
    rows: Sequence[Sequence[object]],
    caption: str = "",
    marked: Collection[int] = (),
) -> str:
    """The rows as a table, the first hundred of them; those numbered in `marked` stand out. All of
    it is escaped."""
    head = "".join(f'<th style="text-align:left">{escape(name)}</th>' for name in heads)
    shown = [
        f'<tr style="font-weight:bold;color:#c02f2f">{_cells(row)}</tr>'
        if number in marked
        else f"<tr>{_cells(row)}</tr>"
        for number, row in enumerate(rows[:MOST_ROWS])
    ]
    left_out = len(rows) - len(shown)
    if left_out:
        shown.append(f'<tr><td colspan="{len(heads)}">{left_out:,} more rows</td></tr>')
    above = f"<p><b>{escape(caption)}</b></p>" if caption else ""
    body = "".join(shown)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div>{above}{table}</div>"


def _cells(row: Sequence[object]) -> str:
    return "".join(
        f'<td style="text-align:left;white-space:pre">{escape(cell)}</td>' for cell in row
    )
