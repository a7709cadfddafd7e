"""The corpus: small buggy programs, and whether a report about one names rank and line.

The comments at the top of each program say which ranks are at fault and, unless it is 3 ranks in
both of our setups, how many ranks it runs on and in which setups of runner.py the bug can occur.
The line that a good verdict names is marked with `# <- here`; `# never: ...` are words that only a
false one contains, and `# line missed: unisono` the setups in which the reports name the rank
alone, for a reason that docs/diagnosis-corpus.md gives. A program that fails nowhere, and only
computes wrong numbers, says so (`# silent: ...`): it runs under the sanitizer.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from faults.runner import PEERS, PEERS_S, Outcome, run_program
from unisono.processes import end_with_parent

FOLDER = Path(__file__).with_name("programs")
_AT_ONCE = 3
_BLAME = re.compile(
    r"((?:rank|ranks) [\d, and-]+(?: \(global [^)]*\))?)(?: on \w+)? "
    r"(?:never|made|left out|called|entered|passed|differ|is slow|came to|closed)"
)
_ENDED = re.compile(r"it raised|they raised|was killed|were killed|exited with|ha(?:s|ve) ended")
_WENT_ON = " continued after "
_RAISED = re.compile(r"^unisono\.errors\.\w+: ")


@dataclass(frozen=True)
class Fault:
    """One program."""

    path: Path
    ranks: int
    culprits: tuple[int, ...]
    setups: tuple[str, ...]
    line: int
    story: str
    silent: str
    never: str
    line_missed: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.path.stem

    def occurs_in(self, setup: str) -> bool:
        """Whether the fault can occur in a setup."""
        return setup in PEERS or ("unisono" if setup == "unisono" else "watched") in self.setups


def read(path: Path) -> Fault:
    """What a program's comments say about it."""
    text = path.read_text()
    comment = re.compile(r"^# (ranks|culprit|setups|silent|never|line missed): (.*)$", re.MULTILINE)
    head = dict(comment.findall(text))
    lines = text.splitlines()
    return Fault(
        path=path,
        ranks=int(head.get("ranks", 3)),
        culprits=tuple(int(rank) for rank in head["culprit"].split(",")),
        setups=tuple(head.get("setups", "unisono watched").split()),
        line=next(number for number, line in enumerate(lines, 1) if "# <- here" in line),
        story=text.split('"""')[1],
        silent=head.get("silent", ""),
        never=head.get("never", ""),
        line_missed=tuple(head.get("line missed", "").split()),
    )


def corpus() -> list[Fault]:
    """All programs, by name."""
    return [read(path) for path in sorted(FOLDER.glob("*.py"))]


def reports_in(outcome: Outcome) -> list[str]:
    """Every report of a rank: a verdict, and the indented lines under it."""
    reports: list[str] = []
    for text in outcome.said:
        inside = False
        for line in text.splitlines():
            if "unisono.watch: " in line or _RAISED.match(line):
                reports.append(_RAISED.sub("", line).rpartition("unisono.watch: ")[2])
                inside = True
            elif inside and line.startswith("  "):
                reports[-1] += "\n" + line
            else:
                inside = False
    return list(dict.fromkeys(reports))


def names_ranks(fault: Fault, sentence: str) -> bool:
    """Whether a sentence names all ranks at fault, anywhere in it, and next to any others."""
    return set(fault.culprits) <= _ranks_in(sentence)


def _ranks_in(sentence: str) -> set[int]:
    """The ranks that a sentence names; of a group's ranks, the global ones."""
    listed = re.findall(
        r"(?:[Rr]anks? |\(global )((?:\d+(?:-\d+)?(?:, | and | -> )?)+)(?! \(global)", sentence
    )
    runs = [run for numbers in listed for run in re.findall(r"(\d+)(?:-(\d+))?", numbers)]
    return {rank for low, high in runs for rank in range(int(low), int(high or low) + 1)}


def false_in(fault: Fault, outcome: Outcome) -> list[str]:
    """Verdicts that are false: they have words that only a false one has, or they blame healthy
    ranks. What is said of a rank that has ended by its exception or by a signal blames nobody, nor
    does a wait that is then said to have gone on."""
    verdicts = [report.partition("\n")[0] for report in reports_in(outcome)]
    over = [verdict.partition(_WENT_ON)[0] for verdict in verdicts if _WENT_ON in verdict]
    return [
        verdict
        for verdict in verdicts
        if (fault.never and fault.never in verdict)
        or (
            (subject := _BLAME.match(verdict))
            and not _ENDED.search(verdict)
            and not any(call in verdict for call in over)
            and not _ranks_in(subject[1]) & {*fault.culprits}
        )
    ]


def names_line(fault: Fault, text: str) -> bool:
    """Whether a text names the line, in the form of reports or of tracebacks."""
    name, line = fault.path.name, fault.line
    return re.search(rf'{re.escape(name)}(:|", line ){line}\b', text) is not None


def names_rank_and_line(fault: Fault, report: str) -> bool:
    """Whether the verdict (the first line) names the ranks, and the report the line."""
    return names_ranks(fault, report.partition("\n")[0]) and names_line(fault, report)


def right(fault: Fault, outcome: Outcome) -> bool:
    """Whether some report names the right rank and line, and the very first verdict is right."""
    reports = reports_in(outcome)
    is_true = not any(fault.never and fault.never in report for report in reports)
    return is_true and any(names_rank_and_line(fault, report) for report in reports)


def outcomes_of(chosen: Sequence[tuple[Fault, str]]) -> Iterator[Outcome]:
    """Run programs in setups, several at once: most of their time they wait."""
    fork = multiprocessing.get_context("fork")  # it has no threads, so it may fork ranks
    with fork.Pool(min(_AT_ONCE, len(chosen)), end_with_parent, (os.getpid(),)) as pool:
        yield from pool.imap(_run, chosen)


def _run(chosen: tuple[Fault, str]) -> Outcome:
    """Run one program until what was said of it is right, or it is plain that nothing will be."""
    fault, setup = chosen
    if setup in PEERS:
        return run_program(fault.path, fault.ranks, setup, deadline_s=3 * PEERS_S)
    enough = functools.partial(right, fault)
    return run_program(fault.path, fault.ranks, setup, deadline_s=60, grace_s=15, enough=enough)
