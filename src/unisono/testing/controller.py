"""One test on many ranks: the controller's replacement for running it."""

from __future__ import annotations

import dataclasses
import re
import sys
import warnings
from collections.abc import Sequence

import pytest

from unisono.testing import results
from unisono.testing.assignment import RankAssignment
from unisono.testing.mark import BadMark, Plan, plan_of
from unisono.testing.pool import Ending, Pool
from unisono.testing.protocol import Ran, RunTest


class Controller:
    """Runs the marked tests of one pytest session on its pool."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._pool = Pool(config)
        self._tests = 0
        self._items: list[pytest.Item] = []
        self._sizes: list[int] = []
        self._positions: dict[pytest.Item, int] = {}

    def close(self, *, gently: bool) -> None:
        self._pool.close(gently=gently)

    def run(self, item: pytest.Item, nextitem: pytest.Item | None, plan: Plan) -> None:
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        merged = results.merge(item, self._by_rank(item, nextitem, plan))
        failed_here = self._tear_down_here(item, nextitem)
        if failed_here is not None and merged[-1].passed:
            merged[-1] = failed_here
        elif failed_here is not None:
            merged[-1].sections.append(("Teardown in the controller", failed_here.longreprtext))
        for report in merged:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def _by_rank(
        self, item: pytest.Item, nextitem: pytest.Item | None, plan: Plan
    ) -> list[list[pytest.TestReport]]:
        following = [self._next_for(rank, item, nextitem) for rank in range(plan.size)]
        later = [None if test is None else str(test.path) for test in following]
        unready = self._pool.prepare(str(item.path), later)
        if any(unready):
            return [
                [results.failed_report(item, "setup", reason)] if reason else []
                for reason in unready
            ]
        self._tests += 1
        first, test_id = self._assignment(item, plan), str(item.nodeid)
        next_ids = [str(test.nodeid) if test else None for test in following]
        runs = [
            RunTest(test_id, next_id, dataclasses.replace(first, rank=rank))
            for rank, next_id in enumerate(next_ids)
        ]
        try:
            endings = self._pool.run(runs, plan.timeout_s)
        finally:
            for file in first.files():
                file.unlink(missing_ok=True)
        self._warn(endings)
        return [self._reports(item, ending) for ending in endings]

    def _assignment(self, item: pytest.Item, plan: Plan) -> RankAssignment:
        """That of rank 0."""
        name = re.sub(r"\W", "_", item.name)[:30]
        files = [f"{self._pool.folder}/{which}-{self._tests}" for which in ("meeting", name)]
        meeting, shared = files
        return RankAssignment(
            0, plan.size, plan.backend, plan.timeout_s, meeting, shared, plan.sanitize
        )

    # -- the next test -------------------------------------------------------------------------

    def _next_for(
        self, rank: int, item: pytest.Item, nextitem: pytest.Item | None
    ) -> pytest.Item | None:
        """A rank's next test: it keeps the fixtures that both tests use."""
        if nextitem is None:
            return None
        self._survey(item.session)
        start = self._positions.get(nextitem, len(self._items))
        for index in range(start, len(self._items)):
            if self._sizes[index] > rank:
                return self._items[index]
        # A pytest-xdist worker may be given any test next: fixtures of wider scopes are kept.
        return item if hasattr(self._config, "workerinput") else None

    def _survey(self, session: pytest.Session) -> None:
        """Record once how many ranks each test needs."""
        if self._items is session.items and len(self._sizes) == len(self._items):
            return
        self._items = session.items
        self._sizes = [_size(item) for item in self._items]
        self._positions = {item: index for index, item in enumerate(self._items)}

    @staticmethod
    def _tear_down_here(
        item: pytest.Item, nextitem: pytest.Item | None
    ) -> pytest.TestReport | None:
        """Tear down the fixtures that earlier tests of the controller left active."""
        call = pytest.CallInfo.from_call(
            lambda: item.session._setupstate.teardown_exact(nextitem),
            "teardown",
            reraise=(pytest.exit.Exception, KeyboardInterrupt),
        )
        return None if call.excinfo is None else pytest.TestReport.from_item_and_call(item, call)

    # -- results --------------------------------------------------------------------------

    def _reports(self, item: pytest.Item, ending: Ending) -> list[pytest.TestReport]:
        if not isinstance(ending, Ran):
            return [results.failed_report(item, "call", ending)]
        restore = self._config.hook.pytest_report_from_serializable
        return [restore(config=self._config, data=dict(data)) for data in ending.reports]

    def _warn(self, endings: Sequence[Ending]) -> None:
        """Pass on the warnings of all ranks, each once."""
        ran = [ending for ending in endings if isinstance(ending, Ran)]
        for warned in dict.fromkeys(warned for ending in ran for warned in ending.warnings):
            text, (module, name), filename, lineno, when, nodeid, location = warned
            category = getattr(sys.modules.get(module), name, Warning)  # perhaps only the rank's
            message = warnings.WarningMessage(text, category, filename, lineno)
            told = {"when": when, "nodeid": nodeid, "location": location}
            self._config.hook.pytest_warning_recorded.call_historic(
                kwargs={"warning_message": message, **told}
            )


def _size(item: pytest.Item) -> int:
    try:
        plan = plan_of(item)
    except BadMark:
        return 0
    return plan.size if plan else 0
