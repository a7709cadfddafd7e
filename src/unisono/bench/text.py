"""A run as text: the cells of its tables, and the sentences around them."""

from collections.abc import Sequence
from typing import Any

from unisono.bench.results import Row, Run
from unisono.plan.sizes import format_bytes
from unisono.show.table import Column

MIDDLE, WIDE = 105, 130


def title(rows: Sequence[Row]) -> str:
    """What the rows of one collective have in common."""
    row = rows[0]
    parts = [row.collective]
    if row.count:
        parts.append(row.dtype)
    if row.op != "none":
        parts.append(row.op)
    if row.collective in ("broadcast", "reduce", "gather", "scatter"):
        parts.append("each rank is root in turn" if row.root < 0 else f"root {row.root}")
    return f"{', '.join(parts)}, {row.ranks} ranks"


def size_text(size_bytes: float) -> str:
    """8 -> "8 B", 65536 -> "64 KiB"."""
    return format_bytes(size_bytes) if size_bytes else "-"


def time_text(time_us: float | None) -> str:
    """About three significant digits."""
    if time_us is None:
        return "-"
    digits = 2 if time_us < 10 else 1 if time_us < 100 else 0
    return f"{time_us:,.{digits}f}"


def bandwidth_text(bandwidth: float) -> str:
    """GB/s; "-" if nothing moves."""
    return f"{bandwidth:.2f}" if bandwidth >= 0.01 else f"{bandwidth:.1g}" if bandwidth else "-"


def ratio_text(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:,.0f}"


COLUMNS = (
    Column(">size", size_text, 0, "nccl-tests' size: the tensor, or the wide side if there is one"),
    Column(">count", str, WIDE, "the size in elements"),
    Column("<backend", str, 0, "what was measured; unisono:ring is unisono with that algorithm"),
    Column(">time us", time_text, 0, "median of the slowest rank's time of one call"),
    Column(">p95", time_text, WIDE, "95% of the samples took at most this many us"),
    Column(
        ">spread",
        "{:.0%}".format,
        MIDDLE,
        "the width of the middle half of the samples, relative to the median",
    ),
    Column(
        ">skew us",
        time_text,
        WIDE,
        "how far apart the ranks arrived; the backend is not responsible",
    ),
    Column(">algbw", bandwidth_text, MIDDLE, "GB/s that the caller sees: size / time, GB = 1e9"),
    Column(">busbw", bandwidth_text, 0, "GB/s that the machine moves: algbw x a factor"),
    Column(">#wrong", str, 0, "elements of the result that were not exactly right, on all ranks"),
    Column(
        ">expected",
        time_text,
        MIDDLE,
        "us, from a model that was fitted to the rows marked calibrates",
    ),
    Column("<verdict", str, 0, "the measured time compared with the expected one"),
    Column(
        ">x floor", ratio_text, WIDE, "times a local add or copy of the same bytes on all ranks"
    ),
    Column(">x first", ratio_text, 0, "times the first backend's time"),
)


def cells(row: Row, first: Row | None) -> list[tuple[float | str | None, str]]:
    """A row's value under each of COLUMNS, and how it is shown."""
    times = row.time_us
    values = [
        row.size_bytes,
        row.count or None,
        row.backend + " *" * row.disturbed,
        times.p50,
        times.p95,
        times.spread,
        row.skew_us,
        row.algbw,
        row.busbw,
        row.wrong if row.count else None,
        row.expected_us,
        row.verdict,
        times.p50 / row.floor_us if row.floor_us else None,
        times.p50 / first.time_us.p50 if first else None,
    ]
    # A range if the samples do not agree on a number.
    texts = {">expected": "" if row.expected_us is None or row.agrees else _range_text(row)}
    return [
        (value, "-" if value is None else texts.get(column.heading) or column.show(value))
        for column, value in zip(COLUMNS, values, strict=True)
    ]


def _range_text(row: Row) -> str:
    return "-".join(map(time_text, row.range_us))


def about(run: Run) -> str:
    facts, versions = run.machine, run.versions
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    return (
        f"{facts['processor']} ({facts['architecture']}), {facts['cores']} cores, "
        f"{run.settings['ranks']} ranks{_about_gpus(facts)}; {named}{_about_hosts(facts)}"
    )


def _about_gpus(facts: dict[str, Any]) -> str:
    if not facts.get("gpu"):
        return ""
    return f" on {facts['gpu']}" if facts["gpus"] == 1 else f" on {facts['gpus']} {facts['gpu']}"


def _about_hosts(facts: dict[str, Any]) -> str:
    hosts = facts.get("hosts", [])
    listed = ", ".join(f"{host['name']} ({host['ranks']})" for host in hosts)
    return f"\n{len(hosts)} hosts: {listed}" if len(hosts) > 1 else ""


def summary(run: Run) -> list[str]:
    """The text below the tables: the worst comes last, above the prompt."""
    return [*model_notes(run), *verdicts(run)]


def model_notes(run: Run) -> list[str]:
    """How well the expected times fit."""
    errors = ", ".join(f"{name} {error:.1%}" for name, error in run.held_out_error.items())
    expected = [row for row in run.rows if row.expected_us is not None and not row.disturbed]
    if not expected:
        return []
    inside = sum(row.verdict == "normal" for row in expected)
    agreeing = sum(row.agrees for row in expected)
    notes = [f"expected times: {inside} of {len(expected)} rows outside the fit lie in their range"]
    if errors:
        notes.append(f"mean absolute error over the {agreeing} whose samples agree: {errors}")
    return notes


def verdicts(run: Run) -> list[str]:
    """What was slow or fast, disturbed, wrong or skipped."""
    lines = []
    for row in run.rows:
        if row.verdict.startswith(("slow", "fast")):
            where = f"{row.collective} of {size_text(row.size_bytes)} on {row.backend}"
            lines.append(f"{where} is {row.verdict} ({_range_text(row)} us): {_reason(row)}")
    lines += [str(gap) for gap in run.skipped if " " in gap.what]
    if any(row.disturbed for row in run.rows):
        lines.append("* other programs took the cores: measure again on a quiet machine")
    if run.wrong:
        names = ", ".join(sorted({row.backend for row in run.rows if row.wrong}))
        lines.append(f"WRONG RESULTS: {run.wrong} elements differ from the exact result ({names})")
    if not run.finished:
        lines.append("the run was interrupted: this is what was measured until then")
    return lines


def _reason(row: Row) -> str:
    if row.disturbed:
        return "other programs took the cores"
    if row.time_us.spread > 0.3:
        return f"its samples spread over {row.time_us.spread:.0%} of the median"
    if row.transfer_us is not None and row.transfer_us < 0.7 * row.time_us.p50:
        return "the ranks arrived far apart"
    return "the samples agree, so look at the backend or the machine"
