"""Writes what is said of each program: `python -m faults.page --output docs/diagnosis-corpus.md`.

Text above the mark in that file is kept. With `--outcomes FILE ...` nothing is run: the outcomes
are those that `python -m faults --json` printed, perhaps in several parts.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from commit import commit
from faults.corpus import (
    Fault,
    corpus,
    names_line,
    names_rank_and_line,
    names_ranks,
    outcomes_of,
    reports_in,
)
from faults.runner import Outcome

MARK = "<!-- what follows is written by tests/faults/page.py -->"
OURS = {
    "unisono": "unisono",
    "watched": "gloo, watched",
    "hosts": "gloo over two hosts, watched",
    "four_hosts": "gloo over four hosts, watched",
}
PEERS = {"gloo": "plain gloo", "detail": "DETAIL", "monitored": "monitored_barrier"}
_ERROR = re.compile(
    r"^(?:\w+\.)*\w*(?:Error|Exception|Failed|terminate called)\w*: .*$", re.MULTILINE
)
_SPEAKER = re.compile(r"\[[Rr]ank ?\d+\]:")
"""How a rank labels its own output."""
_FOLDERS = re.compile(r"/[\w./-]+/(?=\w+\.py)")
_LONGEST = 110


def messages_in(outcome: Outcome) -> list[str]:
    """The last error of every rank, once each, without addresses and paths."""
    found = []
    for text in outcome.said:
        errors = _ERROR.findall(text)
        if errors:
            found.append(re.sub(r"\[[^\]]*:\d+\]", "[...]", errors[-1]))
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Named:
    """What a report named: the ranks at fault, the line."""

    rank: bool
    line: bool

    def __str__(self) -> str:
        return {(True, True): "rank and line", (True, False): "rank", (False, True): "line"}.get(
            (self.rank, self.line), "neither"
        )


def named_by_us(fault: Fault, outcome: Outcome) -> Named:
    """Both must be in one report: the ranks in its first sentence."""
    reports = reports_in(outcome)
    if any(names_rank_and_line(fault, report) for report in reports):
        return Named(True, True)
    verdicts = [report.partition("\n")[0] for report in reports]
    return Named(
        any(names_ranks(fault, verdict) for verdict in verdicts),
        any(names_line(fault, report) for report in reports),
    )


def named_by_peer(fault: Fault, outcome: Outcome) -> Named:
    """The ranks in any one message of any rank; the line in any traceback of any rank, even that of
    the exception that is the bug itself."""
    lines = [line for text in outcome.said for line in text.splitlines() if line[:2] != "  "]
    return Named(
        any(names_ranks(fault, _SPEAKER.sub("", line)) for line in lines),
        any(names_line(fault, text) for text in outcome.said),
    )


def quote_peer(fault: Fault, outcome: Outcome) -> str:
    """A message that names the ranks, or the first one."""
    messages = messages_in(outcome)
    if not messages:
        return "ends, with wrong numbers or none" if outcome.ended else "says nothing"
    told = [message for message in messages if names_ranks(fault, _SPEAKER.sub("", message))]
    text = (told or messages)[0]
    short = text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
    return "`" + short.replace("|", "/") + "`"


def quote_ours(fault: Fault, outcome: Outcome) -> str:
    """The verdict that is right, or the first one."""
    reports = reports_in(outcome)
    good = [report for report in reports if names_rank_and_line(fault, report)]
    return _FOLDERS.sub("", (good or reports or ["says nothing"])[0].partition("\n")[0])


Outcomes = Mapping[tuple[str, str], Outcome]
"""By the name of a program and of a setup."""


def run_all() -> Outcomes:
    """Run every program in every setup."""
    setups = (*OURS, *PEERS)
    chosen = [(fault, setup) for fault in corpus() for setup in setups if fault.occurs_in(setup)]
    found = {}
    for (fault, setup), outcome in zip(chosen, outcomes_of(chosen), strict=True):
        found[fault.name, setup] = outcome
        print(f"{len(found)} of {len(chosen)}: {fault.name} on {setup}", flush=True)
    return found


def load_all(files: list[Path]) -> Outcomes:
    """What earlier runs printed."""
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return {
        (row["name"], row["setup"]): Outcome((*row["said"],), row["ended"], row["told_s"])
        for row in rows
    }


def page(outcomes: Outcomes, at: str) -> str:
    """The score on a commit, and what every setup said about every program."""
    score: dict[str, list[Named]] = {setup: [] for setup in (*OURS, *PEERS)}
    said = []
    for fault in corpus():
        said.append(f"\n**{fault.name}**: {fault.story}\n")
        for setup, name in (OURS | PEERS).items():
            outcome = outcomes.get((fault.name, setup))
            if outcome is None:
                continue
            if setup in PEERS:
                named, quote = named_by_peer(fault, outcome), quote_peer(fault, outcome)
            else:
                named, quote = named_by_us(fault, outcome), quote_ours(fault, outcome)
            score[setup].append(named)
            said.append(f"- {name} ({named}): {quote}")
    lines = [
        MARK,
        "",
        f"Commit {at}:",
        "",
        "| | right rank and line | right rank | right line |",
        "|---|---|---|---|",
    ]
    for setup, name in (OURS | PEERS).items():
        found = score[setup]
        both = sum(named.rank and named.line for named in found)
        ranks, lines_right = sum(named.rank for named in found), sum(named.line for named in found)
        lines.append(f"| {name} | {both} of {len(found)} | {ranks} | {lines_right} |")
    return "\n".join([*lines, "", "## Every program", *said, ""])


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--outcomes", type=Path, nargs="+")
    given = parser.parse_args()
    output: Path = given.output
    at = commit()
    outcomes = load_all(given.outcomes) if given.outcomes else run_all()
    before = output.read_text().partition(MARK)[0] if output.exists() else ""
    output.write_text(before + page(outcomes, at))


if __name__ == "__main__":
    main()
