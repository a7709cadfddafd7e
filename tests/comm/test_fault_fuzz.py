"""Random scenarios with one random fault: ranks that need the culprit say so, the others continue.

A failure shows its seed and scenario. `UNISONO_FAULT_SEEDS=17 pytest tests/comm/test_fault_fuzz.py`
repeats one seed; `17-90` runs a range.
"""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from random_scenarios.rank import EXIT_CODE, STOPPED_S, StepEnd, fault_note, run_scenario
from random_scenarios.scenarios import ENDINGS, Scenario, make_scenario
from ranks import Outcome, RankPool

BLOCK = 15  # seeds per test
LANES = 3  # scenarios at once: they mostly wait
DEADLINE_S = 120.0  # reached only if a rank hangs
WITHIN_S = 5.0  # for survivors to raise, on two cores with more ranks than that; 0.1 is guaranteed

EXIT_CODES = {"kill": -signal.SIGKILL, "exit at once": EXIT_CODE, "exit": EXIT_CODE, "raise": 1}


@dataclass(frozen=True)
class ScenarioResult:
    """How a scenario ended on every rank, when its fault happened, and what it left behind."""

    scenario: Scenario
    by_rank: list[Outcome]
    fault_s: float | None
    left_behind: list[str]


class Lanes:
    """Several pools of ranks, each of which runs one scenario after another."""

    def __init__(self, pools: list[RankPool]) -> None:
        self._idle: queue.SimpleQueue[RankPool] = queue.SimpleQueue()
        for pool in pools:
            self._idle.put(pool)

    def run(self, scenarios: list[Scenario]) -> list[ScenarioResult]:
        with ThreadPoolExecutor(LANES) as executor:
            return list(executor.map(self._run, scenarios))

    def _run(self, scenario: Scenario) -> ScenarioResult:
        pool = self._idle.get()
        try:
            outcomes = pool.outcomes(
                run_scenario,
                scenario.ranks,
                scenario,
                connected=False,
                mortal=True,
                deadline_s=DEADLINE_S,
            )
            note = fault_note(pool.folder, scenario)
            fault_s = float(note.read_text().split()[0]) if note.exists() else None
            left = list(pool.folder.glob("rendezvous-*"))
            for file in left:
                file.unlink()  # the next scenario must not be blamed for it
            names = [path.name for path in left]
            names += [name for name in os.listdir("/dev/shm") if "unisono" in name]
            return ScenarioResult(scenario, outcomes, fault_s, names)
        except BaseException as error:
            error.add_note(str(scenario))
            raise
        finally:
            self._idle.put(pool)


@pytest.fixture(scope="module")
def lanes() -> Iterator[Lanes]:
    with ExitStack() as stack:
        yield Lanes([stack.enter_context(RankPool()) for _ in range(LANES)])


def seeds(default: range) -> list[range]:
    """Blocks of seeds: those asked for, or the default."""
    asked = os.environ.get("UNISONO_FAULT_SEEDS")
    if asked:
        first, _, last = asked.partition("-")
        default = range(int(first), int(last or first) + 1)
    return [default[start : start + BLOCK] for start in range(0, len(default), BLOCK)]


def name(block: range) -> str:
    return f"seeds {block[0]}-{block[-1]}"


@pytest.mark.parametrize("block", seeds(range(30)), ids=name)
def test_one_fault(lanes: Lanes, block: range, record_property: Any) -> None:
    run_block(lanes, block, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("block", [*seeds(range(45, 75)), *seeds(range(1000, 4000))], ids=name)
def test_one_fault_of_many(lanes: Lanes, block: range, record_property: Any) -> None:
    run_block(lanes, block, record_property)


def run_block(lanes: Lanes, block: range, record_property: Any) -> None:
    results = lanes.run([make_scenario(seed) for seed in block])
    complaints, delays_s = [], []
    for result in results:
        judge = Judge(result)
        if wrong := judge.complaints():
            told = "\n".join(f"  * {complaint}" for complaint in wrong)
            again = f"UNISONO_FAULT_SEEDS={result.scenario.seed} pytest {__file__}"
            complaints.append(f"{result.scenario}\n{told}\n  again: {again}")
        delays_s += judge.delays_s
    if delays_s:
        delays_s.sort()
        record_property("detection_s_median", delays_s[len(delays_s) // 2])
        record_property("detection_s_most", delays_s[-1])
    assert not complaints, "\n\n".join(complaints)


class Judge:
    """What must, may and must not have happened in a scenario."""

    def __init__(self, result: ScenarioResult) -> None:
        self.result = result
        self.scenario: Scenario = result.scenario
        self.fault = self.scenario.fault
        self.fault_s = result.fault_s
        if self.fault.kind in ("exit", "raise"):  # the interpreter takes a while to exit
            self.fault_s = result.by_rank[self.fault.rank].ended_s
        self.delays_s: list[float] = []

    def complaints(self) -> list[str]:
        """Everything that is wrong; empty if nothing is."""
        wrong = [f"left behind: {name}" for name in self.result.left_behind]
        if self.fault_s is None:
            wrong.append("the fault did not happen")
        for rank, outcome in enumerate(self.result.by_rank):
            dies = rank == self.fault.rank and self.fault.kind in ENDINGS
            code = EXIT_CODES[self.fault.kind] if dies else None
            if isinstance(outcome.value, str):
                wrong.append(f"rank {rank} failed: {outcome.value}")
            elif outcome.exit_code != code:
                wrong.append(f"rank {rank} ended with {outcome.exit_code}, not {code}")
            poisoned: set[int] = set()
            for end in outcome.value if isinstance(outcome.value, list) else ():
                said = self.about(rank, end, poisoned)
                wrong += [f"rank {rank}, step {end.step}: {text} ({end})" for text in said]
        return wrong

    def about(self, rank: int, end: StepEnd, poisoned: set[int]) -> list[str]:
        """What is wrong with how a step ended on a rank."""
        group = self.scenario.steps[end.step].group
        if end.error is None:
            failed_before = group in poisoned and not self.began_before(end)
            if failed_before or self.must_fail(rank, end.step):
                return ["it should have raised"]
            return []
        first = group not in poisoned
        poisoned.add(group)
        if not self.may_fail(end.step):
            return ["it should not have raised"]
        allowed = self.allowed(rank, end.step)
        if end.error not in allowed:
            return [f"it should have raised {' or '.join(allowed)}"]
        wrong = self.wrong_fields(rank, end)
        if self.fault_s is not None:
            delay_s = end.ended_s - max(end.began_s, self.fault_s)
            limit_s = WITHIN_S + (STOPPED_S if self.fault.kind == "stop" else 0)
            if delay_s > limit_s:
                wrong.append(f"it took {delay_s:.2f} s")
            if first and self.fault.kind in ("kill", "exit at once", "close"):
                self.delays_s.append(delay_s)
        return wrong

    # -- the rules -----------------------------------------------------------------------------

    def affected(self, group: int) -> bool:
        """Whether the fault ends a group."""
        if self.fault.kind == "close":
            return group in self.fault.closed
        step = self.scenario.steps[self.fault.step]
        if self.fault.kind == "interrupt":  # works continue without the thread that waits for them
            blocks = step.later_on(self.rank_in(step.group, self.fault.rank)) == 0
            return blocks and step.kind != "ring" and group == step.group
        if self.fault.kind in ("differ", "skip"):
            return group == step.group
        return self.fault.rank in self.scenario.groups[group]

    def may_fail(self, number: int) -> bool:
        return self.affected(self.scenario.steps[number].group)

    def must_fail(self, rank: int, number: int) -> bool:
        """Whether a rank cannot finish a step without the culprit, which never reaches it."""
        step, fault = self.scenario.steps[number], self.fault
        if not self.affected(step.group):
            return False
        if number < fault.step or (fault.within and number == fault.step):
            return False
        moves = step.kind in ("message", "ring")
        if moves and fault.kind in ("differ", "skip"):
            return False  # it may have finished before the ranks differed
        if rank == fault.rank:
            return fault.kind in ("close", "interrupt", "differ") or number > fault.step
        if step.kind == "ring":
            size = len(self.scenario.groups[step.group])
            apart = self.rank_in(step.group, rank) - self.rank_in(step.group, fault.rank)
            return apart % size in (1, size - 1)
        return fault.rank in self.scenario.members(step)

    def began_before(self, end: StepEnd) -> bool:
        """Whether a step was in progress, and may have finished, before its group failed."""
        step = self.scenario.steps[end.step]
        return step.later > 0 or step.peer_later > 0

    def allowed(self, rank: int, number: int) -> tuple[str, ...]:
        kind, culprit = self.fault.kind, rank == self.fault.rank
        if kind == "kill" or kind == "exit at once":
            return ("PeerLost",)
        if kind in ("exit", "raise"):
            return ("PeerLost",) if self.fault.drained else ("PeerLost", "GroupAborted")
        if kind == "close" and culprit:
            return ("GroupClosed",) if self.fault.drained else ("GroupClosed", "GroupAborted")
        if kind == "close":
            return ("PeerLost",) if self.fault.drained else ("PeerLost", "GroupAborted")
        if kind == "stop":
            return ("CollectiveTimeout",)
        if kind == "interrupt":
            at_it = culprit and number == self.fault.step
            return ("KeyboardInterrupt",) if at_it else ("GroupAborted",)
        return ("CollectiveMismatch",)

    def wrong_fields(self, rank: int, end: StepEnd) -> list[str]:
        group = self.scenario.steps[end.step].group
        culprit, fields = self.rank_in(group, self.fault.rank), end.fields
        wrong = []
        if end.error in ("KeyboardInterrupt", "GroupClosed"):
            return []
        if fields["rank"] != self.rank_in(group, rank):
            wrong.append(f"it names {fields['rank']} as this rank")
        if end.error == "PeerLost" and fields["peer"] != culprit:
            wrong.append(f"it blames {fields['peer']}, not {culprit}")
        if end.error == "GroupAborted" and f"rank {culprit} " not in end.text:
            wrong.append(f"it does not name rank {culprit}")
        if end.error == "CollectiveTimeout":
            never_came = fields["call"] > self.calls_of_culprit(group)
            if never_came and culprit not in fields["missing"]:
                wrong.append(f"it misses {fields['missing']}, not {culprit}")
        if end.error == "CollectiveMismatch":
            size = len(self.scenario.groups[group])
            expected = (culprit,) if size > 2 else ()
            if fields["culprits"] != expected:
                wrong.append(f"it blames {fields['culprits']}, not {expected}")
        return wrong

    def calls_of_culprit(self, group: int) -> int:
        """How many collectives of a group the culprit had started when it stopped."""
        last = self.fault.step + self.fault.within
        begun = [s for s in self.scenario.steps[:last] if s.group == group]
        collectives = [s for s in begun if s.kind not in ("message", "ring")]
        return len(collectives) + (group == 0)  # all meet once at the start

    def rank_in(self, group: int, rank: int) -> int:
        return self.scenario.rank_in(group, rank)
