"""Saved reports as a page: what happened, who waited for whom, where and why, what to do."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from unisono.doctor.incident_timeline import draw_timeline
from unisono.doctor.saved_reports import Incident, Reading, place_of
from unisono.pages import build_page, escape
from unisono.watch.report import RankReport, Report

_MOST_STACKS = 4
_OURS = ("launcher/", "<string>", "watch/", "shared_memory/")

_KINDS = {
    "hang": "A rank never came",
    "lost": "A rank was lost",
    "cycle": "Ranks wait for each other",
    "mismatch": "Ranks called different things",
    "apart": "Calls ran apart",
    "stalled": "A rank stopped moving data",
    "elsewhere": "The missing rank is on another machine",
    "failed": "A call failed",
}
_ADVICE = {
    "hang": (
        "Look at the marked line: that rank has to leave it and make the call that the others are "
        "in, or nobody may make it.",
        "A branch on the rank, or on data that differs between ranks, must not contain a "
        "collective call.",
        "If the rank is only slow (a checkpoint, a first batch), raise the timeout of the group, "
        "or have all ranks wait for it.",
    ),
    "lost": (
        "Look for the end of that rank: its traceback, or, after SIGKILL, the kernel's log "
        "(dmesg) for a lack of memory.",
        "The other ranks only report that it is gone; their tracebacks are consequences.",
    ),
    "cycle": (
        "Have all ranks enter the calls in the same order; calls of different groups count, too.",
        "Of two ranks that exchange messages one has to receive first: or use isend and irecv, or "
        "sendrecv.",
    ),
    "mismatch": (
        "Compare the calls named above: the rank that differs took another branch, or has a "
        "tensor of another shape or type.",
        "The last batch of an epoch is often smaller: drop it, or pad it.",
    ),
    "apart": (
        "From that call on this rank is one call ahead of the others, or behind: look for a call "
        "in a branch that only it takes, or leaves out.",
        "unisono.watch.step() at the beginning of each iteration tells in which one it happens.",
    ),
    "stalled": (
        "The rank came to the call and did not go on: look whether it is stopped (a debugger, "
        "Ctrl-Z), swapping, or starved of cores.",
    ),
    "elsewhere": (
        "Read the reports of the other machines, too: the one that has the missing rank says "
        "where it is.",
    ),
    "failed": ("Read the exception of the rank that failed first; the others follow from it.",),
}


def incident_page(reading: Reading) -> str:
    """All incidents of `reading` on one page, each with its verdict first."""
    sections = [_incident(incident) for incident in reading.incidents]
    problems = "".join(f'<p class="problem">{escape(problem)}</p>' for problem in reading.problems)
    first = reading.incidents[0].report.verdict if reading.incidents else "no incident"
    body = f"<main>{''.join(sections)}</main>{problems}"
    return build_page(f"incident: {first}", body, ("incident.css",))


def _incident(incident: Incident) -> str:
    report = incident.report
    facts = [_KINDS.get(report.kind, report.kind), f"group {report.group} of {report.backend}"]
    if report.waited_s:
        facts.append(f"waited for {report.waited_s:.0f} s")
    if report.made_at:
        facts.append(report.made_at.replace("T", " "))
    details = "".join(f"<li>{escape(line)}</li>" for line in report.details)
    advice = "".join(f"<li>{escape(line)}</li>" for line in _ADVICE.get(report.kind, ()))
    culprits = [rank for rank in report.ranks if rank.rank in report.culprits]
    others = [rank for rank in report.ranks if rank.rank not in report.culprits and rank.stack]
    return (
        f'<article><p class="kicker">{escape(" · ".join(facts))}</p>'
        f'<h1 class="verdict">{escape(report.verdict)}</h1>'
        + (f'<ul class="details">{details}</ul>' if details else "")
        + (f'<section class="panel todo"><h2>What to do</h2><ol>{advice}</ol></section>')
        + draw_timeline(report)
        + "".join(_culprit(rank) for rank in culprits[:_MOST_STACKS])
        + _table(report)
        + _other_stacks(others)
        + _raw(report, incident)
        + "</article>"
    )


def _culprit(rank: RankReport) -> str:
    """Where a rank to blame was: the lines of its program, and its stack."""
    where = place_of(rank)
    if not (where or rank.stack or rank.source):
        return ""
    return (
        f'<section class="panel culprit"><h2>Where {escape(rank.name())} was</h2>'
        + (f"<p>{escape(where)}</p>" if where else "")
        + "".join(_source(rank.source))
        + (
            f"<h3>Its stack, the innermost first</h3>{_stack(_of_program(rank))}"
            if rank.stack
            else ""
        )
        + "</section>"
    )


def _source(lines: Sequence[str]) -> Iterator[str]:
    if lines:
        shown = "".join(
            f'<span class="{"at" if line.startswith(">") else "near"}">{escape(line[2:])}\n</span>'
            for line in lines
        )
        yield f'<pre class="source">{shown}</pre>'


def _of_program(rank: RankReport) -> list[str]:
    """The stack from the program's own line on, without the frames of whoever started it."""
    lines = list(rank.stack)
    own = [number for number, line in enumerate(lines) if rank.place and line.strip() == rank.place]
    if own and all(line.lstrip().startswith((*_OURS, "python")) for line in lines[1 : own[0]]):
        lines[1 : own[0]] = []
    while len(lines) > 1 and lines[-1].lstrip().startswith(_OURS):
        lines.pop()
    return lines


def _stack(lines: Sequence[str]) -> str:
    return f'<pre class="stack">{escape(chr(10).join(lines))}</pre>'


def _table(report: Report) -> str:
    heads = ("rank", "global rank", "pid", "came", "where it was", "last call it finished")
    rows = []
    for rank in report.ranks:
        kind = ' class="blamed"' if rank.rank in report.culprits else ""
        cells = (
            rank.rank,
            rank.global_rank,
            rank.process().removeprefix("pid ") if rank.pid else "-",
            "yes" if rank.arrived else "no",
            place_of(rank) or "-",
            rank.last or "-",
        )
        rows.append(f"<tr{kind}>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
    if not rows:
        return ""
    head = "".join(f"<th>{name}</th>" for name in heads)
    return (
        '<section class="panel"><h2>Every rank</h2><div class="scroll"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _other_stacks(ranks: Sequence[RankReport]) -> str:
    if not ranks:
        return ""
    stacks = "".join(f"<h3>{escape(rank.name())}</h3>{_stack(rank.stack)}" for rank in ranks)
    return f"<details><summary>The stacks of the other ranks</summary>{stacks}</details>"


def _raw(report: Report, incident: Incident) -> str:
    files = ", ".join(file.name for file in incident.files)
    text = json.dumps(asdict(report), indent=1)
    return (
        f"<details><summary>The report as data, from {escape(files)}</summary>"
        f"<pre>{escape(text)}</pre></details>"
    )
