"""What `unisono run` says of ranks that failed: the answer first, everything in a file."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from unisono.errors import RanksFailed, UnisonoError, name_ranks, plural
from unisono.launcher.outcomes import Rank, place_of
from unisono.output_files import write_text
from unisono.watch.exit_status import STATUS
from unisono.watch.report import ADVICE, Report, global_culprits, in_brief, load

_SCREEN = 24
"""After so many lines the headline has left the screen: it is said once more."""
_WITH_WATCH = "The full report has each rank's stack; with --watch, also what ranks waited for."
_PROVEN = "The program ended well, but its numbers are proven wrong."
_PROOFS = ("settings", "drift", "reduced", "race", "sampler")
_ABOUT_CALLS = ("mismatch", "threads", "apart", "cycle")
"""Reports that no later end of a rank explains."""
_WAITS = ("hang", "lost", "stalled", "elsewhere")


def main_report(folder: str, since_s: float, ranks: Sequence[Rank]) -> Report | None:
    """The report in the folder that explains the others: a proof if the ranks ended because of it,
    the first on calls that differ or that an exception carried, or the last of ranks that waited,
    if none has failed and the wait did not end."""
    reports = []
    own = [f"*-{rank.process.group}-*.json" for rank in ranks]  # other jobs may share the folder
    found_files = [file for pattern in own for file in Path(folder).glob(pattern)]
    files = [(file.stat().st_mtime, file) for file in found_files]
    for written_s, file in sorted(files):
        with contextlib.suppress(UnisonoError):  # its rank was killed while it wrote
            reports += [(file.name, load(file))] if written_s >= since_s else []
    failed = [rank for rank in ranks if rank.failed_at is not None]
    is_proven = {(rank.exit_code, rank.failure) for rank in failed} == {(STATUS, None)}
    found = [report for _, report in reports if report.kind in _PROOFS and is_proven]
    found += [report for _, report in reports if report.kind in _ABOUT_CALLS]
    found += [report for name, report in reports if name.startswith("raised")]
    found += [report for _, report in reports[::-1] if report.kind in _WAITS and not failed]
    said = "".join(rank.lines["stderr"].tail for rank in ranks)
    went_on = re.findall(r"(#\d+ of group \S+).* continued after", said)
    return next((it for it in found if f"#{it.call} of group {it.group}" not in went_on), None)


def write_final_report(
    error: RanksFailed, ranks: Sequence[Rank], report: Report | None, folder: str, is_short: bool
) -> str:
    """Write how a run ended to a file in `folder`. Returns what to print: all of it, the most
    important first, or as much as a terminal has room for. An exception of the program's own stands
    before the report of ranks that only missed another one."""
    sentence, _, rest = str(error).partition("\n\n")
    headline, *evidence = sentence.splitlines()
    has_failed = any(rank.failed_at is not None for rank in ranks)
    failure = ranks[error.first].failure if has_failed else None
    own = failure if failure is not None and failure.is_own else None
    if report and own and report.kind not in _ABOUT_CALLS:
        report = report if error.first in global_culprits(report) else None
    if report:
        line = f" ({report.site})" if report.site and ".py:" not in report.verdict else ""
        headline = report.verdict + line + ("" if has_failed else f"; {headline}")
        evidence = str(report).splitlines()[1:]
    elif own:
        headline += "".join(f" ({line})" for line in re.findall(r" at (\S+:\d+)", own.how)[-1:])
    elif has_failed:
        headline += place_of(error.endings[error.first].stack)
    kind = "failed" if own else report.kind if report else "lost" if failure is None else ""
    advice = ADVICE.get(kind, (_PROVEN,))[0] if (has_failed and kind) or report else _WITH_WATCH
    evidence = [line.removeprefix("  ") for line in evidence] or _how_they_ended(error, ranks)
    headline = f"unisono run: {headline}"
    path = os.path.join(folder, f"report-{os.getpid()}.txt") if folder else ""
    try:
        if path:
            write_text(path, "\n".join([headline, *evidence, advice, "", rest]).rstrip() + "\n")
    except OSError:
        path = ""
    lines = [in_brief(headline, evidence, advice, path, is_short)]
    if below := (own.traceback.rstrip() if own else "") if is_short and path else rest:
        lines += ["", below]
    if below.count("\n") > _SCREEN:
        lines += ["", headline]
    return "\n".join(lines)


def _how_they_ended(error: RanksFailed, ranks: Sequence[Rank]) -> list[str]:
    """One line for all ranks that ended in the same way, unless the headline says all."""
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
