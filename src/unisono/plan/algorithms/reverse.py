"""An algorithm run backwards in time is an algorithm for the opposite collective.

If every rank gets a chunk at most once, each chunk travels along a tree away from its holder. Run
backwards, the same trees lead to the holder, and what was copied outwards is added up on the way
in: broadcast becomes reduce, all_gather becomes reduce_scatter, scatter becomes gather (which moves
chunks and adds nothing). Steps and bytes stay the same, with senders and receivers exchanged.
"""

import dataclasses
import functools
from collections.abc import Callable

from unisono.plan.catalog import Builder, algorithm
from unisono.plan.schedule import Action, Phase, Schedule, Step

_OPPOSITES = {"broadcast": "reduce", "all_gather": "reduce_scatter", "scatter": "gather"}


def algorithm_both_ways(
    collective: str, name: str, *, reversed_name: str = ""
) -> Callable[[Builder], Builder]:
    """Register an algorithm and, for the opposite collective, the same run backwards."""

    def register(make: Builder) -> Builder:
        @functools.wraps(make)
        def reverse(*args: int, **options: int) -> Schedule:
            return backwards(make(*args, **options), reversed_name)

        algorithm(_OPPOSITES[collective], reversed_name or name)(reverse)
        return algorithm(collective, name)(make)

    return register


def backwards(schedule: Schedule, name: str = "") -> Schedule:
    """The reverse of a broadcast, all_gather or scatter schedule; `name` replaces its name."""
    collective = _OPPOSITES[schedule.collective]
    action: Action = "copy" if collective == "gather" else "reduce"
    phases = []
    for phase in reversed(schedule.phases):
        last = schedule.at(phase, phase.times - 1)
        step = Step.of(last.destination, last.source, last.chunk, action, last.count)
        phases.append(Phase(step, phase.times, -phase.shift, phase.within))
    return dataclasses.replace(
        schedule, collective=collective, algorithm=name or schedule.algorithm, phases=tuple(phases)
    )
