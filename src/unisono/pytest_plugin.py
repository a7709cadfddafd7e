"""The pytest plugin: `@pytest.mark.ranks` and the fixtures of a test on several ranks.

Every pytest run of every project loads this module, so it imports nothing but pytest; the rest is
imported with the first marked test.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch.distributed

    from unisono.comm.communicator import Communicator
    from unisono.testing.assignment import RankAssignment
    from unisono.testing.controller import Controller

_CONTROLLER: pytest.StashKey[Controller] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(
        "ranks_timeout_s",
        "default time limit of tests with @pytest.mark.ranks, in seconds",
        default="60",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "ranks(count, backend=..., timeout_s=..., sanitize=...): run the test on this many ranks, "
        "processes of one world; a list of counts repeats the test (unisono)",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker("ranks")
    if mark is None:
        return
    from unisono.testing.mark import COUNT, BadMark, counts_of, repeats

    try:
        counts = counts_of(mark)
    except BadMark:
        return  # the test's setup says why
    if repeats(mark):
        metafunc.fixturenames.append(COUNT)
        metafunc.parametrize(COUNT, counts, ids=[f"{count}ranks" for count in counts])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if item.get_closest_marker("ranks") is None or _in_a_rank(item.config):
        return None
    from unisono.testing.controller import Controller
    from unisono.testing.mark import BadMark, plan_of

    if item.config.getoption("setuponly", False) or item.config.getoption("setupplan", False):
        return None  # only collecting
    try:
        plan = plan_of(item)
    except BadMark:
        return None  # its setup says why
    assert plan is not None
    stash = item.config.stash
    if _CONTROLLER not in stash:
        stash[_CONTROLLER] = Controller(item.config)
    stash[_CONTROLLER].run(item, nextitem, plan)
    return True


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """End the ranks as soon as no test is left: pytest-cov, around this, combines their data."""
    result = yield
    _end_ranks(session.config, gently=True)
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("ranks") is None or _in_a_rank(item.config):
        return
    from unisono.testing.mark import plan_of

    plan_of(item)


def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> None:
    """Show unisono's errors without its own frames, as elsewhere."""
    if call.excinfo is not None:
        from unisono.failures import is_shortened

        # a list: a thread may be importing (failures.load_soon)
        for name, module in list(sys.modules.items()):
            if name.startswith("unisono."):
                vars(module)["__tracebackhide__"] = lambda info: is_shortened(info.value)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    hurried = exitstatus in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR)
    _end_ranks(session.config, gently=not hurried)


def pytest_unconfigure(config: pytest.Config) -> None:
    _end_ranks(config, gently=False)


@pytest.fixture
def comm(request: pytest.FixtureRequest) -> Iterator[Communicator]:
    """The Communicator of this test's ranks: a world of its own, closed after the test."""
    from unisono.testing import assignment

    with assignment.world(_assignment(request)) as communicator:
        yield communicator


@pytest.fixture
def process_group(
    request: pytest.FixtureRequest,
) -> Iterator[torch.distributed.ProcessGroup]:
    """torch's default process group over this test's ranks, destroyed after the test."""
    from unisono.testing import assignment

    with assignment.process_group(_assignment(request)) as group:
        yield group


@pytest.fixture
def shared_tmp_path(request: pytest.FixtureRequest) -> Path:
    """A temporary folder that all ranks of this test share; `tmp_path` is each rank's own."""
    folder = Path(_assignment(request).shared)
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _end_ranks(config: pytest.Config, *, gently: bool) -> None:
    controller = config.stash.get(_CONTROLLER, None)
    if controller is not None:
        del config.stash[_CONTROLLER]
        controller.close(gently=gently)


def _in_a_rank(config: pytest.Config) -> bool:
    return config.pluginmanager.has_plugin("unisono-rank")


def _assignment(request: pytest.FixtureRequest) -> RankAssignment:
    from unisono.testing.assignment import ASSIGNMENT

    assignment = request.config.stash.get(ASSIGNMENT, None)
    if assignment is None:
        pytest.fail(
            f"the fixture {request.fixturename} needs ranks: mark the test with "
            "@pytest.mark.ranks(4), or with @pytest.mark.ranks(1) for a world of one",
            pytrace=False,
        )
    return assignment
