"""Saved reports as a page: what happened, who waited for whom, where and why, and what to do."""

from __future__ import annotations

from collections import Counter

from unisono.doctor.saved_reports import Reading, facts_of, place_of, stack_of, tabulate
from unisono.errors import name_ranks
from unisono.plan.sizes import format_seconds
from unisono.show.pages import Html, build_page, element, elements, panel, table
from unisono.show.table import name_of
from unisono.watch.advice import ADVICE
from unisono.watch.report import CallReport, RankReport, Report

_MOST_STACKS = 4


def incident_page(reading: Reading) -> str:
    articles = (_article(incident.report) for incident in reading.incidents)
    problems = elements("p", reading.problems, class_="problem")
    first = reading.incidents[0].report.verdict if reading.incidents else "no incident"
    body = (element("main", *articles), problems)
    return build_page(f"incident: {first}", body, ("incident.css",))


def _article(report: Report) -> Html:
    facts = [*facts_of(report), report.made_at.replace("T", " ")]
    culprits = [rank for rank in report.ranks if rank.rank in report.culprits]
    others = [rank for rank in report.ranks if rank.rank not in report.culprits and rank.stack]
    stacks = [part for rank in others for part in (element("h3", rank.name()), _stack(rank))]
    summary = element("summary", "Stacks of the other ranks")
    todo = element("ol", elements("li", ADVICE.get(report.kind, ())))
    return element(
        "article",
        element("p", " · ".join(filter(None, facts)), class_="kicker"),
        element("h1", report.verdict, class_="verdict"),
        element("ul", elements("li", report.details), class_="details"),
        panel("What to do", todo, kind="todo"),
        draw_ranks(report),
        *map(_culprit, culprits[:_MOST_STACKS]),
        element("details", summary, *stacks) if stacks else "",
    )


def _culprit(rank: RankReport) -> str:
    """Where a rank to blame was: the lines of its program, and its stack."""
    where = place_of(rank)
    if not (where or rank.stack or rank.source):
        return ""
    source = [
        element("span", f"{line[2:]}\n", class_="at" if line.startswith(">") else "near")
        for line in rank.source
    ]
    return panel(
        f"Where {rank.name()} was",
        element("p", where) if where else "",
        element("pre", *source, class_="source") if source else "",
        element("h3", "Its stack, the innermost first") if rank.stack else "",
        _stack(rank) if rank.stack else "",
        kind="culprit",
    )


def _stack(rank: RankReport) -> Html:
    return element("pre", "\n".join(stack_of(rank)), class_="stack")


def draw_ranks(report: Report) -> Html:
    """A table of all ranks: where each was, how long it has waited, and for whom."""
    heads, rows = tabulate(report)
    under_way = [_under_way(rank) for rank in report.ranks]
    calls = [call for call in under_way if call is not None]
    begin_s = min((call.arrived_s for call in calls), default=0.0)
    end_s = max((call.ended_s or 0.0 for call in calls), default=0.0)
    length_s = max(1e-6, end_s - begin_s)
    counts = Counter(rank.pid for rank in report.ranks)  # two hosts may have the same pid
    rank_of = {rank.pid: rank.rank for rank in report.ranks if counts[rank.pid] == 1}
    lines = []
    for rank, row, call in zip(report.ranks, rows, under_way, strict=True):
        cells = [elements("td", row)]
        if call is not None:
            late = min(0.95, (call.arrived_s - begin_s) / length_s)
            label = f"{call.name} {call.site}".rstrip()
            awaited = [rank_of[pid] for pid in call.waits_for if pid in rank_of]
            if awaited:
                label += f", for {name_ranks(awaited)}"
            bar = element("span", label, style=f"margin-left:{100 * late:.0f}%")
            cells.append(element("td", bar, class_="wait"))
        elif calls:
            cells.append(element("td"))
        kind = "blamed" if rank.rank in report.culprits else None
        lines.append(element("tr", *cells, class_=kind))
    names = [*map(name_of, heads)]
    if calls:
        names.append(f"waits (the longest for {format_seconds(length_s)})")
    return panel("Every rank", table([elements("th", names)], lines, class_="ranks"))


def _under_way(rank: RankReport) -> CallReport | None:
    """The call that a rank is in, or that failed."""
    states = ("waiting", "moving", "queued", "failed")
    return next((call for call in rank.calls if call.state in states), None)
