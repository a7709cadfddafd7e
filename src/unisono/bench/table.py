"""Rows as text for other programs and documents: CSV and Markdown."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Sequence

from unisono.bench import text
from unisono.bench.results import Row, Run


def to_csv(run: Run) -> str:
    """One line per row, with nccl-tests' names for the columns that it has; times are us."""
    lines = [_flat(row) for row in run.in_order]
    out = io.StringIO()
    if lines:
        writer = csv.DictWriter(out, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    return out.getvalue()


def _flat(row: Row) -> dict[str, object]:
    times = dataclasses.asdict(row.time_us)
    return {
        "collective": row.collective,
        "backend": row.backend,
        "ranks": row.ranks,
        "size": row.size_bytes,
        "count": row.count,
        "type": row.dtype,
        "redop": row.op,
        "root": row.root,
        "place": row.placement,
        "time": times.pop("p50"),
        "algbw": row.algbw,
        "busbw": row.busbw,
        "wrong": row.wrong,
        **times,
        "spread": row.time_us.spread,
        "skew": row.skew_us,
        "transfer": row.transfer_us,
        "floor": row.floor_us,
        "expected": row.expected_us,
        "verdict": row.verdict,
        "expected_from": row.expected_from,
        "samples": row.samples,
        "calls_per_sample": row.calls_per_sample,
        "disturbed_share": row.disturbed_share,
    }


def side_by_side(run: Run) -> str:
    """Markdown: one line per size, one column per backend; how many times longer than the first."""
    backends = list(dict.fromkeys(row.backend for row in run.in_order))
    first = backends[0] if backends else ""
    headings = ["collective", "size", *(f"{name} us" for name in backends), "floor us"]
    headings += [f"{name} / {first}" for name in backends[1:]]
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)]]
    for rows in text.tables(run, run.rows):
        sizes = dict.fromkeys(row.size_bytes for row in rows)
        lines += [
            _side_by_side([row for row in rows if row.size_bytes == size], backends)
            for size in sizes
        ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _side_by_side(rows: Sequence[Row], backends: Sequence[str]) -> list[str]:
    by_name = {row.backend: row for row in rows}
    medians = [by_name[name].time_us.p50 if name in by_name else None for name in backends]
    mark = " *" if any(row.disturbed for row in rows) else ""
    ratios = [
        text.ratio_text(median, medians[0]) if median is not None else "-" for median in medians[1:]
    ]
    return [
        rows[0].collective + mark,
        text.size_text(rows[0].size_bytes),
        *(text.time_text(median) for median in medians),
        text.time_text(rows[0].floor_us),
        *ratios,
    ]
