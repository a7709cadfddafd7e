"""One result of a test from the results of its ranks, as pytest's TestReports."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Literal

import pytest
from _pytest._code.code import (
    ExceptionChainRepr,
    ExceptionRepr,
    ReprFileLocation,
    ReprTraceback,
    ReprTracebackNative,
)

from unisono.errors import name_ranks
from unisono.launcher.outcomes import without_addresses, without_names, without_notes
from unisono.testing.protocol import Unable

Phase = Literal["setup", "call", "teardown"]
PHASES: tuple[Phase, ...] = ("setup", "call", "teardown")
_Link = tuple[ReprTraceback, ReprFileLocation | None, str | None]

_CONSEQUENCES = ("PeerLost", "GroupAborted", "CollectiveTimeout", "Connection closed by peer")
"""Errors of ranks whose peers have failed: shown after the failures that caused them."""


def failed_report(item: pytest.Item, phase: Phase, why: Unable) -> pytest.TestReport:
    """A failing report in place of a rank that could not write its own."""
    text = f"{why.headline}\n\n{why.detail}\n" if why.detail else f"{why.headline}\n"
    crash = ReprFileLocation(str(item.path), (item.location[1] or 0) + 1, why.headline)
    longrepr = ExceptionChainRepr([(ReprTracebackNative([text]), crash, None)])
    return _report(item, phase, "failed", longrepr)


def merge(
    item: pytest.Item, by_rank: Sequence[Sequence[pytest.TestReport]]
) -> list[pytest.TestReport]:
    """The reports of one test, phase by phase, from the reports of every rank: a phase failed if it
    failed on any rank, and was skipped if every rank skipped it."""
    reports = []
    for phase in PHASES:
        present = {
            rank: report
            for rank, several in enumerate(by_rank)
            for report in several
            if report.when == phase
        }
        if present:
            reports.append(_merge_phase(item, phase, present, len(by_rank)))
        elif phase != "call":
            reports.append(_report(item, phase, "passed", None))  # plugins rely on these two
    return reports


def _merge_phase(
    item: pytest.Item, phase: Phase, reports: dict[int, pytest.TestReport], size: int
) -> pytest.TestReport:
    expected = {
        rank: report
        for rank, report in reports.items()
        if report.skipped and hasattr(report, "wasxfail")
    }
    failed = {
        rank: report
        for rank, report in reports.items()
        if report.failed and not (expected and _passed_by_surprise(report))
    }
    model = next(iter(reports.values()))
    if failed:
        result = _report(item, phase, "failed", _group_failures(failed, size))
    elif expected:
        model = next(iter(expected.values()))
        result = _report(item, phase, "skipped", _group_failures(expected, size))
    elif all(report.skipped for report in reports.values()):
        result = _report(item, phase, "skipped", model.longrepr)
    else:
        result = _report(item, phase, "passed", None)
    if hasattr(model, "wasxfail") and not failed:
        result.wasxfail = model.wasxfail
    result.duration = max(report.duration for report in reports.values())
    result.start = min(report.start for report in reports.values())
    result.stop = max(report.stop for report in reports.values())
    result.sections = _label_sections(reports, size)
    result.user_properties = _unite(report.user_properties for report in reports.values())
    return result


def _passed_by_surprise(report: pytest.TestReport) -> bool:
    return isinstance(report.longrepr, str) and report.longrepr.startswith("[XPASS(strict)]")


def _report(
    item: pytest.Item,
    phase: Phase,
    outcome: Literal["passed", "failed", "skipped"],
    longrepr: object,
) -> pytest.TestReport:
    return pytest.TestReport(
        item.nodeid,
        item.location,
        dict.fromkeys(item.keywords, 1),
        outcome,
        longrepr,  # type: ignore[arg-type]
        phase,
    )


# -- failures ----------------------------------------------------------------------------------


def _group_failures(reports: dict[int, pytest.TestReport], size: int) -> ExceptionRepr | str:
    """All failures, each once, with the ranks that had it; causes before consequences."""
    if size == 1:
        only = reports[0].longrepr
        return only if isinstance(only, ExceptionRepr) else str(only)
    alike: dict[str, list[int]] = {}
    for rank, report in reports.items():
        alike.setdefault(without_names(without_notes(report.longreprtext), rank), []).append(rank)

    def is_consequence(ranks: list[int]) -> bool:
        return any(word in _line(reports[ranks[0]]) for word in _CONSEQUENCES)

    ordered = sorted(alike.values(), key=is_consequence)
    chain: list[_Link] = []
    for ranks in ordered:
        texts = {without_addresses(reports[rank].longreprtext) for rank in ranks}
        shown = f", shown by rank {ranks[0]}" if len(texts) > 1 else ""
        chain.append((_nothing(), None, f" {_who(ranks, size)}{shown} ".center(60, "-")))
        chain.extend(_chain(reports[ranks[0]]))
    # pytest takes the summary's line from the last link of the chain, also in a deserialized
    # report.
    first = reports[ordered[0][0]]
    location = _chain(first)[-1][1] or ReprFileLocation("", 0, "")
    line = f"{_who(ordered[0], size)}: {_line(first)}"
    chain.append((_nothing(), ReprFileLocation(location.path, location.lineno, line), None))
    return ExceptionChainRepr(chain)


def _chain(report: pytest.TestReport) -> list[_Link]:
    """A failure as pytest shows it."""
    longrepr = report.longrepr
    if isinstance(longrepr, ExceptionChainRepr):
        return list(longrepr.chain)
    if isinstance(longrepr, ExceptionRepr):
        return [(longrepr.reprtraceback, longrepr.reprcrash, None)]
    return [(ReprTracebackNative([report.longreprtext + "\n"]), None, None)]


def _line(report: pytest.TestReport) -> str:
    crash = _chain(report)[-1][1]
    text = report.longreprtext.strip() if crash is None else crash.message
    return text.partition("\n")[0]


def _nothing() -> ReprTraceback:
    return ReprTraceback([], None, "long")


def _who(ranks: Collection[int], size: int) -> str:
    if 1 < len(ranks) == size:
        return f"all {size} ranks"
    return name_ranks(ranks)


# -- captured output --------------------------------------------------------------------------


def _label_sections(reports: dict[int, pytest.TestReport], size: int) -> list[tuple[str, str]]:
    """The captured output of all ranks; equal output of several ranks is shown once."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, report in reports.items():
        for section in report.sections:
            ranks.setdefault(section, []).append(rank)
    return [
        (f"{name} ({_who(several, size)})", content) for (name, content), several in ranks.items()
    ]


def _unite(several: Iterable[list[tuple[str, object]]]) -> list[tuple[str, object]]:
    united: list[tuple[str, object]] = []
    for properties in several:
        united += [pair for pair in properties if pair not in united]
    return united
