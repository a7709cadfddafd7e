"""Writes what is said of each program: `python -m faults.page --output docs/diagnosis-corpus.md`.

Text above the mark in that file is kept. With `--outcomes FILE ...` nothing is run: the outcomes
are those that `python -m faults --json` printed, perhaps in several parts. `--said FILE` gets what
every setup said about every program, word for word.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from commit import commit
from faults.corpus import (
    Fault,
    corpus,
    false_in,
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


def load_all(files: list[Path]) -> tuple[Outcomes, str]:
    """What earlier runs printed, and the commits that they ran."""
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    found = {
        (row["name"], row["setup"]): Outcome((*row["said"],), row["ended"], row["told_s"])
        for row in rows
    }
    return found, ", ".join(sorted({row["commit"] for row in rows}))


@dataclass(frozen=True)
class Judged:
    """What a setup said of a program: was it right, how many of it was false, how long it was."""

    named: Named
    is_told: bool
    false: int
    lines: int
    told_s: float


def judge(fault: Fault, setup: str, outcome: Outcome) -> Judged:
    """Lines are those of all ranks; for the others, whatever they print counts as told."""
    lines = sum(len([line for line in text.splitlines() if line]) for text in outcome.said)
    if setup in PEERS:
        return Judged(named_by_peer(fault, outcome), bool(messages_in(outcome)), 0, lines, 0.0)
    false = len(false_in(fault, outcome))
    is_told = bool(reports_in(outcome))
    return Judged(named_by_us(fault, outcome), is_told, false, lines, outcome.told_s)


def table(judged: Mapping[str, list[Judged]]) -> list[str]:
    """A row for each setup. Lines and seconds are medians."""
    lines = [
        "| | said anything | right rank and line | right rank | right line | false statements | "
        "lines printed | seconds to the first |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for setup, name in (OURS | PEERS).items():
        found = judged.get(setup, [])
        if not found:
            continue
        told = sum(each.is_told for each in found)
        both = sum(each.named.rank and each.named.line for each in found)
        ranks, on_line = (sum(each.named.rank for each in found), sum(e.named.line for e in found))
        size = statistics.median(each.lines for each in found)
        seconds = [each.told_s for each in found if each.told_s]
        false = sum(each.false for each in found) if setup in OURS else "-"
        after = f"{statistics.median(seconds):.1f}" if seconds else "-"
        lines.append(
            f"| {name} | {told} of {len(found)} | {both} | {ranks} | {on_line} | {false} | "
            f"{size:.0f} | {after} |"
        )
    return lines


def page(outcomes: Outcomes, at: str) -> str:
    """The score, and a row for every program: what the watch said, and what others named."""
    loud: dict[str, list[Judged]] = {}
    silent: dict[str, list[Judged]] = {}
    rows = []
    for fault in corpus():
        named, said = {}, ""
        for setup, name in (OURS | PEERS).items():
            outcome = outcomes.get((fault.name, setup))
            if outcome is None:
                continue
            found = judge(fault, setup, outcome)
            (silent if fault.silent else loud).setdefault(setup, []).append(found)
            named[name] = str(found.named)
            said = said or quote_ours(fault, outcome)
        rows.append(row(fault, said, named))
    return "\n".join(
        [
            *(MARK, "", f"Commit {at}. Programs that hang, fail or are slow:", "", *table(loud)),
            *("", "Programs that only compute wrong numbers, under the sanitizer:", ""),
            *(*table(silent), "", "## Every program", "", *HEADINGS, *rows, ""),
        ]
    )


HEADINGS = [
    "| program | its bug | the watch | plain gloo; DETAIL; monitored_barrier |",
    "|---|---|---|---|",
]


def row(fault: Fault, said: str, named: Mapping[str, str]) -> str:
    """A row of the table of programs; which setup of ours named less is said where one did."""
    ours = {name: named[name] for name in OURS.values() if name in named}
    less = [f"{name}: {what}" for name, what in ours.items() if what != "rank and line"]
    same = len(set(ours.values())) == 1
    told = f" (names: {less[0].partition(': ')[2]})" if less and same else ""
    told = f" ({'; '.join(less)})" if less and not same else told
    peers = "; ".join(named.get(name, "-") for name in PEERS.values())
    story = " ".join(fault.story.split())
    return f"| {fault.name} | {story} | {said.replace('|', '/')}{told} | {peers} |"


def everything_said(outcomes: Outcomes) -> str:
    """What every setup said about every program."""
    said = []
    for fault in corpus():
        said.append(f"\n**{fault.name}**: {fault.story}\n")
        alike: dict[str, list[str]] = {}  # what several setups say alike stands once
        false: dict[str, list[str]] = {}
        for setup, name in (OURS | PEERS).items():
            outcome = outcomes.get((fault.name, setup))
            if outcome is None:
                continue
            found = judge(fault, setup, outcome)
            quote = (quote_peer if setup in PEERS else quote_ours)(fault, outcome)
            text = f"({found.named}): {quote}"
            alike.setdefault(text, []).append(name)
            if found.false:
                said_falsely = (f"false, {name}: {each}" for each in false_in(fault, outcome))
                false.setdefault(text, []).extend(said_falsely)
        for text, names in alike.items():
            said.append(f"- {'; '.join(names)} {text}")
            said += [f"  - {_FOLDERS.sub('', each)}" for each in false.get(text, [])]
    return "\n".join([*said, ""])


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--outcomes", type=Path, nargs="+")
    parser.add_argument("--said", type=Path)
    given = parser.parse_args()
    output: Path = given.output
    outcomes, at = load_all(given.outcomes) if given.outcomes else (run_all(), commit())
    before = output.read_text().partition(MARK)[0] if output.exists() else ""
    output.write_text(before + page(outcomes, at))
    if given.said:
        given.said.write_text(everything_said(outcomes))


if __name__ == "__main__":
    main()
