"""One rank of a scenario with a fault: it does its part and reports how every step ended."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from expected import assert_same
from random_scenarios.scenarios import ENDINGS, Scenario
from random_scenarios.steps import COLLECTIVES, RankStep
from ranks import attempt
from resources import assert_given_back, held_resources
from unisono.comm.communicator import Communicator
from unisono.comm.factory import connect_on_host
from unisono.comm.meeting.board import FileBoard
from unisono.comm.meeting.deadline import Deadline
from unisono.processes import state_of

PATIENT_S = 60.0
STOPPED_S = 0.5  # how long groups wait for a rank that has been stopped
EXIT_CODE = 3


@dataclass(frozen=True)
class StepEnd:
    """How a step ended on this rank: `error` is None, or the name of what it raised."""

    step: int
    began_s: float
    ended_s: float
    error: str | None
    text: str
    fields: dict[str, Any]


def run_scenario(rank: int, size: int, path: str, scenario: Scenario) -> list[StepEnd] | str:
    """A job for mortal ranks: returns how this one's steps ended, or what else failed."""
    fault = scenario.fault
    try:
        return ScenarioRank(scenario, rank, path).run()
    except BaseException:
        if rank == fault.rank and fault.kind in ENDINGS:
            raise
        return traceback.format_exc()


def fault_note(folder: Path, scenario: Scenario) -> Path:
    """The file in which the culprit records when its fault happens, and its process id."""
    return folder / f"notes-{scenario.seed}-fault"


class ScenarioRank:
    """A rank. What others wait for, it writes to a file next to `path`, where they meet."""

    def __init__(self, scenario: Scenario, rank: int, path: str) -> None:
        self.scenario = scenario
        self.rank = rank
        self.path = path
        self._fault_note = fault_note(Path(path).parent, scenario)

    def run(self) -> list[StepEnd]:
        """Run the scenario, then a new world of the remaining ranks; returns how the scenario's
        steps ended."""
        before = held_resources()
        self._open()
        self._ends: list[StepEnd] = []
        self._under_way: list[tuple[int, int, RankStep]] = []  # when to wait, the step, its part
        own = [n for n, step in enumerate(self.scenario.steps) if self._takes_part(step)]
        for turn, number in enumerate(own):
            self._turn = turn
            self._step(number)
            self._wait(lambda due: due <= self._turn)
        self._wait(lambda due: True)
        for group in self._groups:
            if group is not None:
                group.close()
        assert_given_back(before, "after the scenario")
        if self.scenario.fault.kind == "stop":
            self._wake_the_stopped()
        self._new_world()
        assert_given_back(before, "after the second world")
        return self._ends

    def _note(self, name: str) -> Path:
        return self._fault_note.with_suffix(f".{name}")

    def _note_fault(self) -> None:
        self._note("unfinished").write_text(f"{time.monotonic()} {os.getpid()}\n")
        self._note("unfinished").rename(self._fault_note)

    def _takes_part(self, step: Any) -> bool:
        return self.rank in self.scenario.members(step)

    def _open(self) -> None:
        scenario, fault = self.scenario, self.scenario.fault
        world = _join(self.path, self.rank, scenario.ranks)
        self._groups: list[Communicator | None] = [world]
        self._groups += [world.split(members) for members in scenario.groups[1:]]
        world.barrier()
        for members, group in zip(scenario.groups, self._groups, strict=True):
            if fault.kind == "stop" and fault.rank in members and group is not None:
                group.timeout_s = STOPPED_S

    # -- steps ---------------------------------------------------------------------------------

    def _step(self, number: int) -> None:
        step, fault = self.scenario.steps[number], self.scenario.fault
        group = self._groups[step.group]
        assert group is not None
        culprit = self.rank == fault.rank
        if number == fault.step and culprit:
            if fault.drained:
                self._wait(lambda due: True)
            if fault.kind == "skip":
                self._note_fault()
                return
            if fault.kind == "interrupt":
                self._interrupted(group, number)
                return
            if fault.within:
                killer = threading.Thread(target=self._fail)
                killer.start()
                self._carry_out(group, number)
                killer.join()
                return
            self._fail()
        elif number == fault.held and not culprit:
            wait_for(self._note("over").exists)
        self._carry_out(group, number)

    def _carry_out(self, group: Communicator, number: int) -> None:
        step, fault = self.scenario.steps[number], self.scenario.fault
        if fault.instead is not None and (number, self.rank) == (fault.step, fault.rank):
            step = fault.instead
            self._note_fault()
        part = RankStep(group, step)
        began_s = time.monotonic()
        error = attempt(part.begin)
        if error is not None:
            self._record(number, began_s, error, part)
        elif part.later and part.works:
            self._under_way.append((self._turn + part.later, number, part))
        else:
            self._finish(number, part, began_s)

    def _wait(self, due: Callable[[int], bool]) -> None:
        waiting = [entry for entry in self._under_way if due(entry[0])]
        self._under_way = [entry for entry in self._under_way if not due(entry[0])]
        for _, number, part in waiting:
            self._finish(number, part, time.monotonic())

    def _finish(self, number: int, part: RankStep, began_s: float) -> None:
        errors = [attempt(work.wait) for work in part.works]
        error = next((error for error in errors if error is not None), None)
        if error is None:
            part.check()
        self._record(number, began_s, error, part)

    def _record(
        self, number: int, began_s: float, error: BaseException | None, part: RankStep
    ) -> None:
        if isinstance(error, (AssertionError, TypeError, ValueError)):
            raise error
        name = None if error is None else type(error).__name__
        fields = {} if error is None else _fields_of(error)
        if name == "CollectiveMismatch" and part.step.kind in COLLECTIVES:
            part.check_untouched()
        ended = StepEnd(number, began_s, time.monotonic(), name, str(error), fields)
        self._ends.append(ended)

    # -- faults --------------------------------------------------------------------------------

    def _fail(self) -> None:
        fault = self.scenario.fault
        if fault.within:
            time.sleep(self.scenario.seed % 7 * 0.0005)
        self._note_fault()
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "exit at once":
            os._exit(EXIT_CODE)
        elif fault.kind == "exit":
            sys.exit(EXIT_CODE)
        elif fault.kind == "raise":
            raise LookupError("this rank fails on purpose")
        elif fault.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.kind == "close":
            for number in fault.closed:
                group = self._groups[number]
                assert group is not None
                group.close()

    def _interrupted(self, group: Communicator, number: int) -> None:
        """Ctrl-C while this rank waits for ranks that hold back until it has been interrupted."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        main = threading.get_native_id()
        caller = threading.Thread(target=self._interrupt_once_asleep, args=(main,))
        part = RankStep(group, self.scenario.steps[number])
        began_s = time.monotonic()
        caller.start()
        error = attempt(part.begin)
        for work in part.works:
            error = error or attempt(work.wait)
        caller.join()
        self._note("over").touch()
        if part.works:  # which have continued
            assert isinstance(error, KeyboardInterrupt), error
            self._finish(number, part, began_s)
        else:
            self._record(number, began_s, error, part)

    def _interrupt_once_asleep(self, thread: int) -> None:
        """Wait until the engine sleeps: Python's own futexes carry other operations."""
        end = time.monotonic() + 20
        while time.monotonic() < end:
            with open(f"/proc/self/task/{thread}/syscall") as file:
                words = file.read().split()
            if words[0] in ("202", "98") and int(words[2], 16) in (0, 128):
                self._note_fault()
                os.kill(os.getpid(), signal.SIGINT)
                return
            time.sleep(0.002)

    # -- afterwards ----------------------------------------------------------------------------

    def _wake_the_stopped(self) -> None:
        """It continues once all others have finished without it."""
        others = [rank for rank in range(self.scenario.ranks) if rank != self.scenario.fault.rank]
        self._note(f"ended-{self.rank}").touch()
        if self.rank == others[0]:
            for other in others:
                wait_for(self._note(f"ended-{other}").exists)
            wait_for(self._fault_note.exists)  # they may not have needed it in its last step
            culprit = int(self._fault_note.read_text().split()[1])
            wait_for(lambda: state_of(culprit).is_stopped)
            os.kill(culprit, signal.SIGCONT)

    def _new_world(self) -> None:
        fault = self.scenario.fault
        gone = [fault.rank] if fault.kind in ENDINGS else []
        left = [rank for rank in range(self.scenario.ranks) if rank not in gone]
        if len(left) < 2:
            return
        with _join(f"{self.path}-second", left.index(self.rank), len(left)) as world:
            for count in (3, 100_000):
                world.all_reduce(tensor := torch.ones(count))
                assert_same(tensor, torch.full((count,), float(len(left))))
            after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
            sent = world.isend(torch.full((50,), float(world.rank)), after)
            world.recv(got := torch.zeros(50), before)
            sent.wait()
            assert_same(got, torch.full((50,), float(before)))


def _fields_of(error: BaseException) -> dict[str, Any]:
    """Those it was given, and the others as its classes have them."""
    names = [name for kind in type(error).__mro__ for name in vars(kind).get("__annotations__", {})]
    return {name: getattr(error, name) for name in names} | vars(error)


def wait_for(condition: Callable[[], bool]) -> None:
    """The pool's deadline ends a wait that never succeeds."""
    while not condition():
        time.sleep(0.001)


def _join(path: str, rank: int, size: int) -> Communicator:
    board = FileBoard(path, deadline=Deadline(PATIENT_S))
    return connect_on_host(board, rank, size, timeout_s=PATIENT_S)
