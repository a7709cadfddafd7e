"""Random scenarios with one fault in them: they depend only on a seed, which replays them.

A scenario is one list of steps. Every rank runs the steps that it takes part in, in order, so no
scenario can deadlock by itself; ranks wait for works a few steps later.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch

from random_scenarios.steps import COLLECTIVES, Step, draw_step

REDUCING = ("all_reduce", "reduce", "reduce_scatter")
ROOTED = ("reduce", "broadcast", "gather", "scatter")
PAIRED = ("gather", "scatter", "all_to_all")  # ranks may differ in size
DTYPES = (torch.float32, torch.int64, torch.bfloat16, torch.uint8, torch.float64, torch.int32)
COUNTS = (0, 1, 7, 60, 300, 5000, 5000, 70_000)
ENDINGS = ("kill", "exit at once", "exit", "raise")  # the culprit's process is gone
FAULTS = (*ENDINGS, "stop", "close", "interrupt", "differ", "skip")


@dataclass(frozen=True)
class Fault:
    """What `rank` does when it reaches `step`, which it takes part in.

    `within`: during the step, not before. `drained`: after it has waited for everything in
    progress. `closed`: the groups that it closes. `instead`: what it calls instead. `held`: the
    step that the others begin only once the culprit was interrupted.
    """

    kind: str
    rank: int
    step: int
    within: bool = False
    drained: bool = False
    closed: tuple[int, ...] = ()
    instead: Step | None = None
    held: int = -1


@dataclass(frozen=True)
class Scenario:
    """What all ranks do. The first of its groups is the world."""

    seed: int
    ranks: int
    groups: tuple[tuple[int, ...], ...]
    steps: tuple[Step, ...]
    fault: Fault

    def rank_in(self, group: int, rank: int) -> int:
        """A rank of the world as a rank of a group."""
        return self.groups[group].index(rank)

    def members(self, step: Step) -> tuple[int, ...]:
        """The ranks of the world that take part in a step."""
        return step.members(self.groups)

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: {self.ranks} ranks, {self.fault}"]
        lines += [f"  group {number}: {ranks}" for number, ranks in enumerate(self.groups)]
        lines += [f"  step {number}: {step}" for number, step in enumerate(self.steps)]
        return "\n".join(lines)


def make_scenario(seed: int) -> Scenario:
    """The scenario of a seed."""
    chance = random.Random(seed)
    ranks = chance.choice((2, 2, 3, 3, 3, 4, 5, 8))
    world = tuple(range(ranks))
    sizes = [chance.randint(2, ranks) for _ in range(chance.randint(1, 3))]
    groups = [world, *(tuple(chance.sample(world, size)) for size in sizes)]
    steps = [_step(chance, groups) for _ in range(chance.randint(5, 25))]
    kind = FAULTS[seed % len(FAULTS)]
    culprit = chance.randrange(ranks)
    if kind in ("differ", "skip"):
        return _differing(chance, seed, groups, steps, kind, culprit)
    scenario = Scenario(seed, ranks, tuple(groups), tuple(steps), Fault(kind, culprit, 0))
    own = [number for number, step in enumerate(steps) if culprit in scenario.members(step)]
    if not own:
        steps.append(_step(chance, groups[:1], "barrier"))
        own = [len(steps) - 1]
    at = chance.choice(own)
    within = kind in ("kill", "stop") and chance.random() < 0.5
    drained = chance.random() < 0.5
    closed: tuple[int, ...] = ()
    if kind == "close":
        of_culprit = [number for number, group in enumerate(groups) if culprit in group]
        closed = tuple(sorted(chance.sample(of_culprit, chance.randint(1, len(of_culprit)))))
    held = at if kind == "interrupt" else -1
    if kind == "interrupt" and not drained:
        # another call of the same group already waits, so the step itself waits for its turn
        ahead = _step(chance, groups, "all_reduce", steps[at].group)
        steps.insert(at, replace(ahead, later=9))
        at += 1
    fault = Fault(kind, culprit, at, within, drained, closed, held=held)
    return replace(scenario, steps=tuple(steps), fault=fault)


def _step(
    chance: random.Random,
    groups: list[tuple[int, ...]],
    kind: str | None = None,
    group: int | None = None,
) -> Step:
    if kind is None:
        return draw_step(chance, groups, DTYPES, COUNTS, group=group)
    return draw_step(chance, groups, DTYPES, COUNTS, [kind], group)


def _differing(
    chance: random.Random,
    seed: int,
    groups: list[tuple[int, ...]],
    steps: list[Step],
    kind: str,
    culprit: int,
) -> Scenario:
    """One rank makes another call, or skips one, and then makes the next."""
    group = chance.choice([number for number, ranks in enumerate(groups) if culprit in ranks])
    at = chance.randint(0, len(steps))
    usual = _step(chance, groups, chance.choice(COLLECTIVES), group)
    steps.insert(at, usual)
    if kind == "skip":
        others = [other for other in COLLECTIVES if other != usual.kind]
        after = _step(chance, groups, chance.choice(others), group)
        steps.insert(at + 1, after)
        fault = Fault(kind, culprit, at)
    else:
        fault = Fault(kind, culprit, at, instead=_changed(chance, usual, len(groups[group])))
    return Scenario(seed, len(groups[0]), tuple(groups), tuple(steps), fault)


def _changed(chance: random.Random, step: Step, size: int) -> Step:
    ways = ["kind"]
    if step.kind != "barrier":
        ways.append("dtype")
    if step.kind in REDUCING:
        ways.append("op")
    if step.kind in ROOTED:
        ways.append("root")
    if step.kind != "barrier" and step.kind not in PAIRED:
        ways.append("count")
    way = chance.choice(ways)
    if way == "kind":
        return replace(step, kind=chance.choice([k for k in COLLECTIVES if k != step.kind]))
    if way == "dtype":
        return replace(step, dtype=chance.choice([d for d in DTYPES if d != step.dtype]))
    if way == "op":
        return replace(step, op="max" if step.op == "sum" else "sum")
    if way == "root":
        return replace(step, root=chance.choice([r for r in range(size) if r != step.root]))
    count = chance.choice([count for count in COUNTS if count != step.counts[0]])
    return replace(step, counts=(count,) * len(step.counts))
