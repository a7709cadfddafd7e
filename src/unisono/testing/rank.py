"""The session of one rank: a pytest run that collects and runs what its controller asks for.

Loaded by `-p unisono.testing.rank` in the rank's process (nursery.py), otherwise with the
controller's command line. The session lasts until the controller ends it, or is gone.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Generator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import _pytest.assertion
import _pytest.logging
import pytest

from unisono import variables
from unisono.comm.engine import compare_shapes
from unisono.comm.shared_memory.exceptions import NEEDED_LATER
from unisono.processes import STACK_SIGNAL, write_stacks_to
from unisono.testing import assignment
from unisono.testing.nursery import CHANNEL
from unisono.testing.protocol import Collected, Exit, Ran, RunTest, Start, Unable, Warned

# The controller selects the tests, stops after failures, talks to the user and writes files;
# options for these must not reach a rank.
_OWN_OPTIONS: dict[str, Any] = {
    **dict.fromkeys(("keyword", "markexpr"), ""),
    **dict.fromkeys(("lf", "failedfirst", "newfirst", "stepwise", "stepwise_skip"), False),
    **dict.fromkeys(("setuponly", "setupshow", "setupplan", "collectonly"), False),
    **dict.fromkeys(("cacheclear", "pyargs", "usepdb", "trace"), False),
    **dict.fromkeys(("deselect", "cacheshow", "xmlpath"), None),
    "maxfail": 0,
    "log_file": os.devnull,
    # of pytest-xdist and pytest-rerunfailures
    **dict.fromkeys(("numprocesses", "maxprocesses"), None),
    **dict.fromkeys(("distload", "looponfail"), False),
    "dist": "no",
    "tx": [],
    "reruns": 0,
}


def stacks_file(folder: str, rank: int) -> Path:
    return Path(folder, f"rank-{rank}.stacks")


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """Become a rank: this hook runs before any conftest or plugin of the project is loaded."""
    descriptor = int(os.environ.pop(CHANNEL))
    os.set_inheritable(descriptor, False)
    channel = Connection(descriptor)
    start: Start = channel.recv()
    sys.path[:] = start.sys_path
    sys.argv[:] = start.argv
    pluginmanager.set_blocked("terminalreporter")
    if "cov_master_host" not in start.worker_input:
        pluginmanager.set_blocked("_cov")  # pytest-cov: the controller measures nothing
    pluginmanager.register(RankSession(channel, start), "unisono-rank")


class _QuickCatching(_pytest.logging.catching_logs):  # type: ignore[type-arg]
    """pytest's own locks torch's 42 loggers that do not propagate, one by one, six times a test.
    Each phase of a test enters two of these, one after the other: one search serves both."""

    _found: tuple[type, list[Any]] | None = None

    def __enter__(self) -> Any:
        if self.level is not None:
            return super().__enter__()
        kind = type(self.handler)
        if _QuickCatching._found is not None and _QuickCatching._found[0] is kind:
            loggers, _QuickCatching._found = _QuickCatching._found[1], None
        else:
            every = list(logging.root.manager.loggerDict.values())
            alone: list[Any] = [each for each in every if not getattr(each, "propagate", True)]
            loggers = [logging.root, *alone]
            _QuickCatching._found = kind, loggers
        self.attached_loggers = loggers
        for logger in loggers:
            logger.handlers.append(self.handler)
        return self.handler

    def __exit__(self, *raised: Any) -> None:
        if self.level is not None:
            logging.root.setLevel(self.orig_level)
        _QuickCatching._found = None
        for logger in self.attached_loggers:
            if self.handler in logger.handlers:  # the test may have removed it
                logger.handlers.remove(self.handler)


if hasattr(_pytest.logging.catching_logs, "attached_loggers"):  # pytest 9.2 and later
    vars(_pytest.logging)["catching_logs"] = _QuickCatching


class RankSession:
    def __init__(self, channel: Connection, start: Start) -> None:
        self._channel = channel
        self._start = start
        self._items: dict[str, pytest.Item] = {}
        self._directories: dict[tuple[Path, pytest.Collector], pytest.Collector] = {}
        self._entered: set[pytest.Collector] = set()
        self._errors: list[str] = []
        self._reports: list[dict[str, Any]] = []
        self._warnings: list[Warned] = []
        self._sanitizing = contextlib.ExitStack()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> Generator[None, object, object]:
        options = vars(config.option)
        options.update({name: value for name, value in _OWN_OPTIONS.items() if name in options})
        options["basetemp"] = os.path.join(self._start.folder, f"rank-{self._start.rank}")
        # pytest-xdist's mark of a process whose reports are shown by another; plugins look for it.
        config.workerinput = {"workerid": "master", **self._start.worker_input}  # type: ignore[attr-defined]
        config.workeroutput = {}  # type: ignore[attr-defined]
        return (yield)

    def pytest_collection(self) -> bool:
        return True  # file by file, on the controller's request

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        with stacks_file(self._start.folder, self._start.rank).open("a") as file:
            write_stacks_to(file)
            # Outside the tests' time limits, and before the freeze. A thread that imported the rest
            # after the first test would slow the next ones down, and every collection.
            for name in ("unisono.world.world", *NEEDED_LATER):
                importlib.import_module(name)
            if variables.watch_is_wanted():
                importlib.import_module("unisono.watch").start_if_asked()
            gc.freeze()  # keeps the collections after every test quick
            with contextlib.suppress(EOFError):  # the controller is gone
                self._serve(session)
            faulthandler.unregister(STACK_SIGNAL)
            faulthandler.disable()
        return True

    def _serve(self, session: pytest.Session) -> None:
        while (request := self._channel.recv()) is not None:
            if isinstance(request, str):
                self._channel.send(Collected(self._collect(session, request)))
                continue
            answer = self._run(session, request)
            try:
                self._channel.send(answer)
            except (TypeError, AttributeError, ValueError) as error:  # what pickle raises
                self._channel.send(Unable("the report cannot be sent", str(error)))
            if isinstance(answer, Exit) or (isinstance(answer, Unable) and answer.broken):
                return

    # -- collecting ------------------------------------------------------------------------------

    def _collect(self, session: pytest.Session, path: str) -> str | None:
        self._errors.clear()
        _pytest.assertion.pytest_collection(session)  # so that this file's asserts are rewritten
        try:
            items = session.perform_collect([path])
        except pytest.UsageError as error:
            return "\n".join(map(str, error.args))
        except Exception:
            return traceback.format_exc()
        self._items.update((str(item.nodeid), item) for item in items)
        gc.collect()
        gc.freeze()  # freeze these, too: collecting a thousand tests' objects takes 50 ms each time
        return "\n".join(self._errors) or None

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._errors.append(report.longreprtext)

    # Each file is collected separately. Folders must still be the same nodes every time, because
    # the fixtures of conftest files and packages belong to them.

    @pytest.hookimpl(tryfirst=True, specname="pytest_collect_directory")
    def pytest_collect_known_directory(
        self, path: Path, parent: pytest.Collector
    ) -> pytest.Collector | None:
        return self._directories.get((path, parent))

    @pytest.hookimpl(wrapper=True)
    def pytest_collect_directory(
        self, path: Path, parent: pytest.Collector
    ) -> Generator[None, pytest.Collector | None, pytest.Collector | None]:
        node = yield
        if node is not None:
            self._directories[path, parent] = node
        return node

    def pytest_collectstart(self, collector: pytest.Collector) -> None:
        """pytest loads the conftest files of all arguments at its start, but a collection drops the
        fixtures of those that it did not use: register them again."""
        if not isinstance(collector, pytest.Directory) or collector in self._entered:
            return
        self._entered.add(collector)
        plugins, name = self._config.pluginmanager, str(collector.path / "conftest.py")
        conftest = plugins.get_plugin(name)
        # those of the root are never dropped
        if conftest is not None and collector.path != self._config.rootpath:
            fixtures: Any = plugins.get_plugin("funcmanage")
            fixtures.pytest_plugin_registered(plugin=conftest, plugin_name=name)

    # -- running ---------------------------------------------------------------------------------

    def _run(self, session: pytest.Session, run: RunTest) -> Ran | Unable | Exit:
        item = self._items.get(run.nodeid)
        if item is None:
            return Unable(
                "this test was not found in its file",
                "Does its id, or whether it is collected, differ from process to process?",
            )
        following: pytest.Item | pytest.Collector | None = None
        if run.next_nodeid is not None:
            following = self._items.get(run.next_nodeid, item)
        if following is item:  # the next test is unknown: keep fixtures of wider scopes
            following = item.parent
        self._reports.clear()
        self._warnings.clear()
        session.config.stash[assignment.ASSIGNMENT] = run.assignment
        assignment.set_environment(run.assignment)
        compare_shapes(by_default=True)  # each time: a test that stops the watch turns it off
        try:
            session._setupstate.teardown_exact(item)  # if another test was expected next
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
        except pytest.exit.Exception as error:
            return Exit(str(error.msg), error.returncode)
        except BaseException as error:
            headline = f"the test ended the rank's session: {type(error).__name__}"
            return Unable(headline, traceback.format_exc(), broken=True)
        finally:
            del session.config.stash[assignment.ASSIGNMENT]
        return Ran(tuple(self._reports), tuple(self._warnings))

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_teardown(self) -> Generator[None, None, None]:
        """After the fixtures, but in the test's own teardown: what is found, and its warnings,
        belong to this test and not to the next."""
        try:
            yield
        finally:
            self._sanitizing.close()  # if the setup has failed
            assignment.close_groups()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Groups that fixtures make are sanitized, too."""
        self._sanitizing = contextlib.ExitStack()
        given = self._config.stash[assignment.ASSIGNMENT]
        self._sanitizing.enter_context(assignment.sanitized(given))

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self) -> Generator[None, object, object]:
        """A proof fails the test itself."""
        with self._sanitizing.pop_all():
            return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        config = self._config
        data = config.hook.pytest_report_to_serializable(config=config, report=report)
        self._reports.append(data)

    def pytest_configure(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_warning_recorded(
        self,
        warning_message: warnings.WarningMessage,
        when: str,
        nodeid: str,
        location: tuple[str, int, str] | None,
    ) -> None:
        given = warning_message
        category = given.category.__module__, given.category.__name__
        where = (given.filename, given.lineno, when, nodeid, location)
        self._warnings.append((str(given.message), category, *where))
