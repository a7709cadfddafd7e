"""The repository's own record: tables and plots in README.md and docs/performance.md.

    python benchmarks/record.py      write them again from benchmarks/results/*.json

A table is between two comments, `<!-- bench: NAME -->` and `<!-- end -->`, where NAME is a file
of benchmarks/results without its ending. "NAME all_reduce,barrier 8,64K" takes only these
collectives and sizes, and `<!-- bench: all -->` every file, with two plots for each collective:
docs/plots/NAME/all_reduce-time.svg and all_reduce-bandwidth.svg. Their colours are variables, so
that they suit light and dark pages alike; the site puts them into its pages as they are. Tables
have the sizes of `_SHOWN`: plots and files have them all.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from unisono.bench import plot, text
from unisono.bench.results import Row, Run, by_collective, by_size, read
from unisono.errors import UnisonoError
from unisono.plan.sizes import parse_sizes
from unisono.show.table import to_markdown

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "benchmarks" / "results"
PLOTS = REPOSITORY / "docs" / "plots"
PAGES = (REPOSITORY / "README.md", REPOSITORY / "docs" / "performance.md")
_HALVES = ("time", "bandwidth")
_NAMES = {"mpi": "Open MPI"}
_TITLES = {
    "ping_pong": "ping-pong (a message and its answer)",
    "all_reduce_async": "all_reduce with async_op, then wait",
}
_SHOWN = {0, 2**10, 2**16, 2**20, 2**24, 2**26}
"""Sizes in the tables of docs/performance.md, beside the smallest."""
_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_COLOURS = """<style>svg { --unisono: #0a7a55; --gloo: #c8501a; --nccl: #7044c4; --mpi: #2465b8;
--soft: #5d626d; --line: #dfe0e3; --faint: #9a9ea8;
font-family: system-ui, "DejaVu Sans", sans-serif; }
@media (prefers-color-scheme: dark) { svg { --unisono: #3fc590; --gloo: #f48a55; --nccl: #b096f5;
--mpi: #6eaaf7; --soft: #a2a7b4; --line: #2b2f39; --faint: #6d7380; } }</style>"""
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
        for rows in _with_curves(run):
            save_plots(rows, PLOTS / name)
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


def _with_curves(run: Run) -> list[list[Row]]:
    return [rows for rows in by_collective(run.rows) if plot.has_curves(rows)]


def save_plots(rows: Sequence[Row], folder: Path) -> None:
    """Time and bandwidth of one collective over size, a file for each."""
    folder.mkdir(exist_ok=True)
    drawn = plot.draw(rows).split("<svg ")[1:]
    names = [*dict.fromkeys(row.backend for row in rows)]
    colours = [f"var(--{name})" for name in names] + ["var(--faint)"]
    words = [*(_NAMES.get(name, name) for name in names), "floor (dots)"]
    key = "".join(
        f'<text x="352" y="{182 - 13 * (len(words) - at)}" text-anchor="end" '
        f'style="font-size: 10px; font-weight: 600; fill: {colour}">{word}</text>'
        for at, (word, colour) in enumerate(zip(words, colours, strict=True))
    )
    spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    for half, svg in zip(_HALVES, drawn, strict=True):
        whole = f"<svg {spaces} {svg}".replace("</title>", f"</title>{_COLOURS}", 1)
        whole = whole.rstrip().removesuffix("</svg>") + key + "</svg>"
        (folder / f"{rows[0].collective}-{half}.svg").write_text(" ".join(whole.split()) + "\n")


def _section(name: str, run: Run) -> str:
    """The plots, and the tables folded below them."""
    plots = "".join(
        f"**{_TITLES.get(collective, collective)}**\n\n"
        + " ".join(f"![{collective}: {h}](plots/{name}/{collective}-{h}.svg)" for h in _HALVES)
        + "\n\n"
        for collective in (rows[0].collective for rows in _with_curves(run))
    )
    lines = "\n".join(f"- {line}" for line in text.model_notes(run))
    smallest = {rows[0].collective: rows[0].size_bytes for rows in by_collective(run.rows)}
    rows = [row for row in run.rows if row.size_bytes in _SHOWN | {smallest[row.collective]}]
    shown = replace(run, rows=rows)
    disturbed = "\n\\* other programs had a share of the cores in this row.\n"
    mark = disturbed if any(row.disturbed for row in rows) else ""
    return (
        f"## {heading(run)}\n\n{text.about(run)}.\n\n{plots}"
        f"<details>\n<summary>In figures</summary>\n\n"
        f"{side_by_side(shown)}{mark}\n{lines}\n\n</details>\n"
    )


def heading(run: Run) -> str:
    """The run in words: Two ranks on two Arm cores."""
    kinds = {"aarch64": "Arm", "x86_64": "Xeon" if "Xeon" in run.machine["processor"] else "x86"}
    ranks, cores = (
        _WORDS[number] if number < len(_WORDS) else str(number)
        for number in (run.settings["ranks"], run.machine["cores"])
    )
    kind = kinds.get(run.machine["architecture"], run.machine["architecture"])
    return f"{ranks} ranks on {cores} {kind} cores".capitalize().replace(kind.lower(), kind)


def side_by_side(run: Run) -> str:
    """Markdown: one line per size, one column per backend; how many times longer than the first."""
    backends = list(dict.fromkeys(row.backend for row in run.in_order))
    first = backends[0] if backends else ""
    headings = ["collective", "size", *(f"{name} us" for name in backends), "floor us"]
    headings += [f"{name} / {first}" for name in backends[1:]]
    lines = [
        _side_by_side(of_size, backends)
        for rows in by_collective(run.rows)
        for of_size in by_size(rows)
    ]
    return to_markdown([headings[0], *(f">{name}" for name in headings[1:])], lines)


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
