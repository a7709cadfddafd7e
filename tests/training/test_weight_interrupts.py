"""Interrupts during the switch to new weights: an engine serves one version, and says which."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono.training.weights.endpoints as weights_module
import unisono.training.weights.staging as weight_staging
from ranks import attempt
from unisono import Communicator, WeightUpdateError
from unisono.collectives.objects import all_gather_object
from unisono.training import WeightReceiver, WeightSender
from unisono.training.deferral import defer_signals
from unisono.training.weights.shards import Held, held_tensors
from unisono.training.weights.staging import WeightStaging

FILES = {str(Path(module.__file__ or "")) for module in (weight_staging, weights_module)}


class Interrupt(BaseException):
    """What a signal's handler may raise."""


class Engine:
    """Tensors of one version, one of them with another view, and a staged next version."""

    def __init__(self, tensors: int) -> None:
        self.weights = {f"{i}": torch.zeros(2) for i in range(tensors)}
        self.view = self.weights["0"][:1]
        self.version = 0
        self.staging = WeightStaging()

    def stage(self) -> Held:
        mine = held_tensors(self.weights)
        ties = {name: name for name in mine}
        self.staging.prepare(None, ties, mine, torch.device("cpu"))  # type: ignore[arg-type]
        for tensor in self.staging.tensors.values():
            tensor.fill_(self.version + 1)
        return mine

    def change_over(self, mine: Held) -> None:
        self.staging.swap(mine, partial(setattr, self, "version", self.version + 1))

    def check(self) -> None:
        """All weights have the version that the engine reports."""
        assert torch.stack(list(self.weights.values())).unique().tolist() == [self.version]
        assert float(self.view) == self.version


def raising_at(event_number: int, opcodes: bool) -> tuple[Callable[..., Any], list[int]]:
    """A trace function that raises at the n-th event in the files under test, and its count."""
    seen = [0]

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in FILES:
            return None
        frame.f_trace_opcodes = opcodes
        seen[0] += 1
        if seen[0] == event_number:
            raise Interrupt
        return trace

    return trace, seen


def test_an_exception_at_any_instruction_of_the_swap_leaves_one_version() -> None:
    engine = Engine(3)
    ended = set()
    for instruction in range(1, 10_000):
        mine = engine.stage()
        before = engine.version
        trace, seen = raising_at(instruction, opcodes=True)
        sys.settrace(trace)
        try:
            engine.change_over(mine)
        except Interrupt:
            pass
        finally:
            sys.settrace(None)
        engine.check()
        ended.add(engine.version - before)
        if seen[0] < instruction:
            break
    assert instruction > 100, "it was traced"
    assert ended == {0, 1}, "some came too early, some too late"


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_step_that_fails_is_undone_with_those_before_it(failing: int) -> None:
    cells = [["old"] for _ in range(3)]

    def fail() -> None:
        raise MemoryError

    steps: list[Any] = [partial(cell.__setitem__, 0, "new") for cell in cells]
    steps.insert(failing, fail)
    back = [partial(cell.__setitem__, 0, "old") for cell in cells]
    with pytest.raises(MemoryError):
        weight_staging.do_all_or_none(steps, back)
    assert cells == [["old"]] * 3


@pytest.fixture
def interrupting() -> Iterator[None]:
    """SIGALRM raises, as Ctrl-C does; but not during garbage collection, where it would be lost."""

    def raise_it(*_: Any) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, raise_it)
    gc.disable()
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    gc.enable()
    signal.signal(signal.SIGALRM, before)


def test_signals_aimed_at_the_swap_of_800_tensors(interrupting: None) -> None:
    engine = Engine(800)
    took_s = min(time_change_over(engine) for _ in range(5))
    interrupted = 0
    for turn in range(1000):
        mine = engine.stage()
        try:
            signal.setitimer(signal.ITIMER_REAL, took_s * (turn % 30 + 1) / 30)
            engine.change_over(mine)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except Interrupt:
            interrupted += 1
        engine.check()
        if interrupted == 20:
            return
    pytest.fail(f"only {interrupted} signals came during a swap")


def time_change_over(engine: Engine) -> float:
    mine = engine.stage()
    begin_s = time.perf_counter()
    engine.change_over(mine)
    return time.perf_counter() - begin_s


# -- a whole update --------------------------------------------------------------------------------


@pytest.mark.provokes
@pytest.mark.ranks(2)
def test_an_exception_at_any_line_of_the_change_over_leaves_one_version(
    comm: Communicator,
) -> None:
    ended = set()
    for line in range(1, 1000):
        group = comm.split(range(2), f"line {line}")
        assert group is not None
        group.timeout_s = 20
        raised = update_interrupted_at(group, line, ended)
        group.close()
        if not any(all_gather_object(raised, comm)):
            break
    if comm.rank == 1:
        assert line > 20, "it was traced"
        assert ended == {0, 1}


def update_interrupted_at(group: Communicator, line: int, ended: set[int]) -> bool:
    """One update, during whose switch the engine is interrupted; returns whether it was."""
    weights = {f"layer {i}": torch.full((5,), float(1 - group.rank)) for i in range(4)}
    if group.rank == 0:
        with WeightSender(group, weights) as sender:
            error = attempt(sender.update, 1)
        assert error is None or (isinstance(error, WeightUpdateError) and error.group_ended)
        return False
    view = weights["layer 1"][2:3]
    receiver = WeightReceiver(group, weights)
    change_over = receiver._change_over
    trace, seen = raising_at(line, opcodes=False)

    def traced(*args: Any) -> None:
        sys.settrace(trace)
        try:
            change_over(*args)
        finally:
            sys.settrace(None)

    receiver._change_over = traced  # type: ignore[method-assign]
    with contextlib.suppress(Interrupt):
        receiver.update()
    assert {float(x) for weight in weights.values() for x in weight} == {receiver.version}
    assert float(view) == receiver.version
    ended.add(receiver.version)
    receiver.close()
    return seen[0] >= line


@pytest.mark.provokes
@pytest.mark.ranks(2)
def test_ctrl_c_waits_for_a_commit_of_the_users_own(comm: Communicator) -> None:
    served: dict[str, float] = {}

    def commit(staged: dict[str, torch.Tensor]) -> None:
        for name, tensor in staged.items():
            served[name] = float(tensor[0])
            os.kill(os.getpid(), signal.SIGINT)
            break
        time.sleep(0)  # where a handler would run
        served.update({name: float(tensor[0]) for name, tensor in staged.items()})

    group = comm.split(range(2), "own commit")
    assert group is not None
    weights = {f"layer {i}": torch.ones(3) for i in range(5)}
    if comm.rank == 0:
        with pytest.raises(WeightUpdateError):
            WeightSender(group, weights).update(7)
    else:
        receiver = WeightReceiver(group, commit=commit)
        before = signal.getsignal(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                receiver.update()
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        finally:
            signal.signal(signal.SIGINT, before)
        assert served == dict.fromkeys(weights, 1.0)
        assert receiver.version == 7
    group.close()
    comm.barrier()


# -- signals that wait -----------------------------------------------------------------------------


def test_signals_wait_and_a_second_one_does_not(interrupting: None) -> None:
    reached = []

    def raise_signals(count: int) -> None:
        with defer_signals():
            for _ in range(count):
                signal.raise_signal(signal.SIGALRM)
            reached.append(count)
        reached.append(-count)

    for count in (1, 2):
        with pytest.raises(Interrupt):
            raise_signals(count)
    assert reached == [1], "the first one waits for the end, the second one for nothing"


def test_every_handler_is_called_though_one_raises() -> None:
    called = []

    def handler(number: int, _: Any) -> None:
        called.append(number)
        raise Interrupt

    def raise_all() -> None:
        with defer_signals():
            for number in numbers:
                signal.raise_signal(number)
            assert called == []

    numbers = [signal.SIGUSR1, signal.SIGUSR2]
    before = [signal.signal(number, handler) for number in numbers]
    try:
        with pytest.raises(Interrupt):
            raise_all()
        assert sorted(called) == sorted(numbers)
        assert [signal.getsignal(number) for number in numbers] == [handler, handler]
    finally:
        for number, old in zip(numbers, before, strict=True):
            signal.signal(number, old)


def test_in_another_thread_nothing_is_touched() -> None:
    seen = []

    def look() -> None:
        before = signal.getsignal(signal.SIGINT)
        with defer_signals():
            seen.append(signal.getsignal(signal.SIGINT) is before)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [True]
