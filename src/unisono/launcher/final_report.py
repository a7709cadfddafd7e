"""What `unisono run` says of ranks that failed: the answer first, everything in a file."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unisono.errors import RanksFailed, UnisonoError, name_ranks, plural
from unisono.launcher.outcomes import Rank, place_of
from unisono.output_files import write_text
from unisono.watch.advice import ADVICE
from unisono.watch.report import Report, global_culprits, load

_MOST_EVIDENCE = 10
_SCREEN = 24
"""After so many lines the headline has left the screen: it is said once more."""
_ABOUT_CALLS = ("mismatch", "threads", "apart", "cycle")
"""Reports that no later end of a rank explains."""
_PROOFS = ("settings", "drift", "reduced", "race", "sampler")
_LINE = re.compile(r" at (\S+:\d+)")


class ReportFolder:
    """Where the ranks of a run save their reports: `given`, or one of its own, which is removed if
    it stays empty. Its `path` is "" if none can be made."""

    def __init__(self, given: str = "") -> None:
        self._is_own = not given
        self.path = given
        with contextlib.suppress(OSError):
            self.path = given or tempfile.mkdtemp(prefix="unisono-reports-")
        self._before = self._files()

    def __enter__(self) -> ReportFolder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_own:
            with contextlib.suppress(OSError):
                os.rmdir(self.path)

    def reports(self) -> list[tuple[Report, bool]]:
        """What the ranks have reported, in the order of time; and whether an exception carried
        it."""
        found = []
        for file in sorted(self._files() - self._before, key=lambda file: file.stat().st_mtime_ns):
            with contextlib.suppress(UnisonoError):  # a rank was killed while it wrote
                found.append((load(file), file.name.startswith("raised")))
        return found

    def _files(self) -> set[Path]:
        return set(Path(self.path).glob("*.json")) if self.path else set()


@dataclass(frozen=True)
class FinalReport:
    """The `headline`, the `evidence` for it, the `traceback` of the program's own exception, if
    that is the cause, what to do (`advice`), and how each rank ended (`rest`)."""

    headline: str
    evidence: Sequence[str]
    advice: str
    traceback: str = ""
    rest: str = ""

    def write(self, folder: str, is_short: bool) -> str:
        """Write all of it to a file in `folder`. Returns what to print: all of it, the most
        important first, or only as much as a terminal has room for."""
        headline = f"unisono run: {self.headline}"
        whole = [headline, *self.evidence, self.advice, "", self.rest]
        path = os.path.join(folder, f"report-{os.getpid()}.txt")
        try:
            write_text(path, "\n".join(whole).rstrip() + "\n")
            pointer = f"the full report: {path}"
        except OSError as error:
            pointer, is_short = f"{path} cannot be written: {error.strerror}", False
        shown = self.evidence[:_MOST_EVIDENCE] if is_short else self.evidence
        lines = [headline, *(f"  {line}" for line in (*shown, self.advice, pointer) if line)]
        if below := self.traceback if is_short else self.rest:
            lines += ["", below]
        if below.count("\n") > _SCREEN:
            lines += ["", headline]
        return "\n".join(lines)


def main_report(
    reports: Sequence[tuple[Report, bool]], said: str, have_failed: bool
) -> Report | None:
    """The report that explains the others: the first on calls that differ, or that an exception
    carried; of ranks that waited to the end, not until some `have_failed`, the last. `said` is what
    the ranks have written, for waits that came to an end."""
    able = [(found, raised) for found, raised in reports if found.kind in ADVICE]
    about_calls = [report for report, _ in able if report.kind in _ABOUT_CALLS]
    carried = [report for report, was_raised in able if was_raised]
    waits = [] if have_failed else [report for report, _ in reversed(able)]
    found = [*about_calls, *carried, *waits]
    found = [report for report in found if not _has_gone_on(report, said)]
    alike = [report for report in found if _subject(report) == _subject(found[0])]
    return max(alike, key=lambda report: len(report.verdict), default=None)


def _subject(report: Report) -> object:
    return report.group, report.call, report.culprits


def _has_gone_on(report: Report, said: str) -> bool:
    call = f"#{report.call} of group {report.group}"
    return re.search(rf"{re.escape(call)}\b.* continued after", said) is not None


def of_failure(
    error: RanksFailed, ranks: Sequence[Rank], report: Report | None, is_watched: bool
) -> FinalReport:
    """How a run ended with `error`, by the `report` of the watch if there is one. An exception of
    the program's own stands before the report of ranks that only missed another one."""
    sentence, _, rest = str(error).partition("\n\n")
    headline, *evidence = sentence.splitlines()
    has_failed = any(rank.failed_at is not None for rank in ranks)
    failure = ranks[error.first].failure if has_failed else None
    own = failure if failure is not None and failure.is_own else None
    if own and report and report.kind not in _ABOUT_CALLS:
        report = report if error.first in global_culprits(report) else None
    advice = ""
    if report is not None:
        headline = _headline(report) + ("" if has_failed else f"; {headline}")
        evidence = str(report).splitlines()[1:]
        advice = ADVICE[report.kind][0]
    elif failure is None and (has_failed or is_watched):
        headline += place_of(error.endings[error.first].stack) if has_failed else ""
        advice = ADVICE["lost"][0]
    elif not evidence:
        advice = "With --watch, the report says which rank is to blame and where every rank is."
    if own is not None:
        headline += "" if report else "".join(f" ({at})" for at in _LINE.findall(own.how)[-1:])
        advice = ADVICE["failed"][0]
    evidence = [line.removeprefix("  ") for line in evidence] or _how_they_ended(error, ranks)
    return FinalReport(headline, evidence, advice, own.traceback.rstrip() if own else "", rest)


def of_proofs(reports: Sequence[tuple[Report, bool]], status: int) -> FinalReport | None:
    """A run that ended well, but for what the sanitizer has proven, if anything."""
    proofs = [report for report, _ in reports if report.kind in _PROOFS]
    if not proofs:
        return None
    first, *others = proofs
    return FinalReport(
        headline=_headline(first),
        evidence=[*first.details, *map(_headline, others)],
        advice=f"exit status {status}: the program ended well, but its numbers are proven wrong",
    )


def _headline(report: Report) -> str:
    """The verdict, with a line of the program in any case."""
    needs_line = report.site and not re.search(r"\.py:\d", report.verdict)
    return f"{report.verdict} ({report.site})" if needs_line else report.verdict


def _how_they_ended(error: RanksFailed, ranks: Sequence[Rank]) -> list[str]:
    """One line for all ranks that ended in the same way, those that failed on top, unless the
    headline says all."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(ranks, key=lambda rank: rank.failed_at is None):
        ending = error.endings[rank.number]
        how = rank.failure.how if rank.failure else ending.how + place_of(ending.stack)
        groups.setdefault(how, []).append(rank.number)
    return [
        f"{name_ranks(alike)} {how if len(alike) == 1 else plural(how)}"
        for how, alike in groups.items()
        if alike != [error.first] or ranks[error.first].failed_at is None
    ]
