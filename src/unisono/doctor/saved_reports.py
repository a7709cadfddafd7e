"""Saved reports of the watch: read, grouped by incident, shown in a terminal or as a page: what
happened, who waited for whom, where and why, and what to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import asdict, dataclass
from itertools import compress
from pathlib import Path

from rich.console import Console
from rich.text import Text

from unisono.errors import UnisonoError, name_ranks
from unisono.plan.sizes import format_seconds
from unisono.show.pages import Html, build_page, element, elements, panel, table
from unisono.show.table import BARE, build_table, name_of, to_json
from unisono.watch.report import ADVICE, CallReport, RankReport, Report, load


@dataclass(frozen=True)
class Incident:
    """One incident: `report` is the most informative of the reports that ranks saved."""

    report: Report
    files: tuple[Path, ...]


@dataclass(frozen=True)
class Reading:
    """The contents of the files, in their order. `problems` says why a file cannot be shown."""

    incidents: tuple[Incident, ...]
    problems: tuple[str, ...]


def read(files: Iterable[Path]) -> Reading:
    """Read all files; one that cannot be read does not prevent the others from being shown."""
    found: dict[Hashable, list[tuple[Path, Report]]] = {}
    problems = []
    for file in files:
        try:
            report = load(file)
        except UnisonoError as error:
            problems.append(str(error))
        else:
            found.setdefault(_identity(report), []).append((file, report))
    incidents = []
    for alike in found.values():
        best = max((report for _, report in alike), key=_how_much)
        incidents.append(Incident(best, tuple(dict.fromkeys(file for file, _ in alike))))
    return Reading(tuple(incidents), tuple(problems))


def _identity(report: Report) -> Hashable:
    """What the reports of one incident have in common, on every rank. A message has no number to
    tell it from others: there the sentence decides."""
    pids = tuple((rank.host, rank.pid) for rank in report.ranks)
    which = report.verdict if report.call is None else report.call
    return report.group, which, report.culprits, pids


def _how_much(report: Report) -> tuple[int, int]:
    """How much it says: stacks count most, then its sentence ("was killed by SIGKILL" says more
    than "has ended")."""
    return sum(len(rank.stack) > 1 for rank in report.ranks), len(report.verdict)


def print_json(reading: Reading) -> None:
    incidents = [
        {"files": incident.files, **asdict(incident.report)} for incident in reading.incidents
    ]
    print(to_json({"reports": incidents, "problems": reading.problems}))


def print_reports(reading: Reading, every_stack: bool, console: Console) -> None:
    """Each incident: verdict, details, where each rank was, and the stacks of those to blame."""
    for number, incident in enumerate(reading.incidents):
        if number:
            console.print()
        _print_incident(incident, every_stack, console)


def _print_incident(incident: Incident, every_stack: bool, console: Console) -> None:
    report = incident.report
    console.print(Text(report.verdict, "bold red"), soft_wrap=True)
    for line in report.details:
        console.print(Text(f"  {line}"), soft_wrap=True)
    facts = [*facts_of(report), f"from {', '.join(map(str, incident.files))}"]
    console.print(Text("; ".join(facts), "dim"), soft_wrap=True)
    if any(place_of(rank) or rank.last for rank in report.ranks):
        heads, rows = tabulate(report)
        styles = ["bold red" * (rank.rank in report.culprits) for rank in report.ranks]
        console.print()
        console.print(build_table(heads, rows, styles, **BARE))
    hidden = []
    for rank in report.ranks:
        if rank.stack and (every_stack or rank.rank in report.culprits):
            console.print(Text(f"\nrank {rank.rank} ({rank.process()})", "bold"))
            for line in stack_of(rank):
                console.print(Text(f"  {line}"), soft_wrap=True)
        elif rank.stack:
            hidden.append(rank.rank)
    if hidden:
        stacks = "stack" if len(hidden) == 1 else "stacks"
        console.print(Text(f"\n--stacks shows the {stacks} of {name_ranks(hidden)}", "dim"))


def facts_of(report: Report) -> list[str]:
    """Its kind, where it happened, and after how long."""
    after = [f"after {report.waited_s:.0f} s"] if report.waited_s else []
    return [report.kind, f"group {report.group} of {report.backend}", *after]


def tabulate(report: Report) -> tuple[list[str], list[list[str]]]:
    """Headings and a row for each rank, with global ranks and hosts if they differ."""
    moved = any(rank.rank != rank.global_rank for rank in report.ranks)
    over_hosts = any(rank.host for rank in report.ranks)
    heads = [">rank", ">global rank", ">pid", "host", "came", "where it was"]
    heads.append("last call it finished")
    shown = [True, moved, True, over_hosts, True, True, True]
    rows = [
        [
            str(rank.rank),
            str(rank.global_rank),
            str(rank.pid or "-"),
            rank.host or "-",
            "yes" if rank.arrived else "no",
            place_of(rank) or "-",
            rank.last or "-",
        ]
        for rank in report.ranks
    ]
    return list(compress(heads, shown)), [list(compress(row, shown)) for row in rows]


def place_of(rank: RankReport) -> str:
    """The state, or the line and what it calls; empty if unknown."""
    if rank.state or not rank.place:
        return rank.state or rank.doing or rank.call
    line = rank.place.partition(" in ")[0]
    return f"{line}, in {rank.doing}" if rank.doing else rank.place


def stack_of(rank: RankReport) -> list[str]:
    """Its stack without the frames of the launcher that started it."""
    frames = ("launcher/", "<string>")
    return [line for line in rank.stack if not line.lstrip().startswith(frames)]


# -- as a page -------------------------------------------------------------------------------------

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
