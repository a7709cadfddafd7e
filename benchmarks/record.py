"""The repository's own record: tables and plots in README.md and docs/performance.md.

    python benchmarks/record.py      write them again from benchmarks/results/*.json

A table is between two comments, `<!-- bench: NAME -->` and `<!-- end -->`, where NAME is a file
of benchmarks/results without its ending. "NAME all_reduce,barrier 8,64K" takes only these
collectives and sizes, and `<!-- bench: all -->` every file, with its plot.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from unisono.bench import plot, text
from unisono.bench.results import Row, Run, read
from unisono.errors import UnisonoError
from unisono.plan.sizes import parse_sizes

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "benchmarks" / "results"
PLOTS = REPOSITORY / "docs" / "plots"
PAGES = (REPOSITORY / "README.md", REPOSITORY / "docs" / "performance.md")
_BLOCK = re.compile(r"(<!-- bench: (\S+)(?: (\S+) (\S+))? -->\n).*?(<!-- end -->)", re.DOTALL)


def runs() -> dict[str, Run]:
    """The results of `unisono bench`; older files of other forms are ignored."""
    found = {}
    for path in sorted(RESULTS.glob("*.json")):
        try:
            found[path.stem] = read(path)
        except UnisonoError:
            continue
    return found


def write_all() -> None:
    """Draw every run, and rewrite every marked table."""
    known = runs()
    PLOTS.mkdir(exist_ok=True)
    for name, run in known.items():
        plot.save(run, PLOTS / f"{name}.png")
    for page in PAGES:
        before = page.read_text()
        after = _BLOCK.sub(lambda match: match[1] + _inner(match, known) + match[5], before)
        if after != before:
            page.write_text(after)
            print(f"wrote {page.relative_to(REPOSITORY)}")


def _inner(match: re.Match[str], known: dict[str, Run]) -> str:
    name, collectives, sizes = match[2], match[3], match[4]
    if name == "all":
        return "\n" + "\n".join(_section(name, run) for name, run in known.items())
    if name not in known:
        kept = match[0][len(match[1]) : -len(match[5])]
        print(f"record.py: there is no {name}.json yet: its table stays", file=sys.stderr)
        return kept
    run = known[name]
    if collectives:
        # An operation without a size has size 0.
        wanted = {0, *parse_sizes(sizes)}
        rows = [row for row in run.rows if row.collective in collectives.split(",")]
        run = replace(run, rows=[row for row in rows if row.size_bytes in wanted])
    return f"\n{side_by_side(run)}\n"


def _section(name: str, run: Run) -> str:
    lines = "\n".join(f"- {line}" for line in text.summary(run) if not line.startswith("*"))
    disturbed = "\n\\* other programs had a share of the cores in this row.\n"
    mark = disturbed if any(row.disturbed for row in run.rows) else ""
    return (
        f"## {name}\n\n{text.about(run)}.\n\n{side_by_side(run)}{mark}\n{lines}\n\n"
        f"![time and bandwidth over size](plots/{name}.png)\n"
    )


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
        text.ratio_text(median / medians[0]) if median and medians[0] else "-"
        for median in medians[1:]
    ]
    return [
        rows[0].collective + mark,
        text.size_text(rows[0].size_bytes),
        *(text.time_text(median) for median in medians),
        text.time_text(rows[0].floor_us),
        *ratios,
    ]


if __name__ == "__main__":
    write_all()
