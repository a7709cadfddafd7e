"""Writes docs/diagnosis.md's table: `python -m faults.page --output ../docs/diagnosis.md`.

What stands above the mark in that file is kept.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from faults.corpus import Fault, corpus, names_place, reports_in
from faults.play import PEERS_S, Outcome, play

MARK = "<!-- what follows is written by tests/faults/page.py -->"
PEERS = {"gloo": "plain gloo", "detail": "DETAIL", "monitored": "monitored_barrier"}
_ERROR = re.compile(
    r"^(?:\w+\.)*\w*(?:Error|Exception|Failed|terminate called)\w*: .*$", re.MULTILINE
)
_LONGEST = 110


def messages_in(outcome: Outcome) -> list[str]:
    """The last error of every rank, once each, without addresses and paths."""
    found = []
    for text in outcome.said:
        errors = _ERROR.findall(text)
        if errors:
            found.append(re.sub(r"\[[^\]]*:\d+\]", "[...]", errors[-1]))
    return list(dict.fromkeys(found))


def cell_of_peer(fault: Fault, outcome: Outcome) -> tuple[int, str]:
    """Whether a message names the ranks and the line, or only the ranks; and what it says."""
    messages = messages_in(outcome)
    if not messages:
        ended = "ends, with wrong numbers or none" if outcome.ended else "says nothing"
        return 0, ended
    told = [message for message in messages if _names_ranks(fault, message)]
    text = (told or messages)[0]
    short = text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
    return (1 if told else 0), "`" + short.replace("|", "/") + "`"


def _names_ranks(fault: Fault, message: str) -> bool:
    listed = re.findall(r"[Rr]anks?\(?s?\)? ?((?:\d+(?:, )?)+)", message)
    named = {int(number) for numbers in listed for number in re.findall(r"\d+", numbers)}
    return set(fault.culprits) <= named


def first_report(fault: Fault, outcome: Outcome) -> tuple[bool, str]:
    """The report that is right, or the first one."""
    reports = reports_in(outcome)
    good = [report for report in reports if names_place(fault, report)]
    verdict = (good or reports or ["nothing"])[0]
    return bool(good), verdict.partition("\n")[0]


def page(faults: Sequence[Fault]) -> str:
    """Score, table, and every verdict."""
    score = {"unisono": [0, 0], "watched": [0, 0]}
    ranks_named = dict.fromkeys(PEERS, 0)
    verdicts, rows = [], []
    for fault in faults:
        row = [f"`{fault.name}`"]
        verdicts.append(f"\n**{fault.name}**: {fault.story}\n")
        for make, count in score.items():
            if make not in fault.makes:
                row.append("")
                continue
            good, verdict = first_report(fault, play(fault.path, fault.ranks, make))
            count[0] += good
            count[1] += 1
            row.append("right" if good else "wrong")
            verdicts.append(f"- {make}: {verdict}")
        for make in PEERS:
            outcome = play(fault.path, fault.ranks, make, deadline_s=3 * PEERS_S)
            named, text = cell_of_peer(fault, outcome)
            ranks_named[make] += named
            row.append(("names the rank" if named else "") or text)
            verdicts.append(f"- {PEERS[make]}: {text}")
        rows.append(row)
        print(" | ".join(row), flush=True)
    lines = [
        MARK,
        "",
        "| | right rank and line |",
        "|---|---|",
        f"| unisono | {score['unisono'][0]} of {score['unisono'][1]} |",
        f"| gloo, watched | {score['watched'][0]} of {score['watched'][1]} |",
    ]
    for make, name in PEERS.items():
        lines.append(f"| {name} | 0 of {len(rows)}; the right rank {ranks_named[make]} times |")
    lines += ["", "## Every program", *verdicts, ""]
    return "\n".join(lines)


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    output: Path = parser.parse_args().output
    before = output.read_text().partition(MARK)[0] if output.exists() else ""
    output.write_text(before + page(corpus()))


if __name__ == "__main__":
    main()
