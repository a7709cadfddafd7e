"""An algorithm run backwards in time is an algorithm for the opposite collective.

If every rank gets a chunk at most once, each chunk travels along a tree away from its holder. Run
backwards, the same trees lead to the holder, and what was copied outwards is added up on the way
in: broadcast becomes reduce, all_gather becomes reduce_scatter, scatter becomes gather (which moves
chunks and adds nothing). Steps and bytes stay the same, with senders and receivers exchanged.
"""

from __future__ import annotations

from unisono.plan.schedule import Phase, Schedule, Step

_OPPOSITES = {"broadcast": "reduce", "all_gather": "reduce_scatter", "scatter": "gather"}


def backwards(schedule: Schedule, algorithm: str) -> Schedule:
    """The reverse of a broadcast, all_gather or scatter schedule, named `algorithm`."""
    collective = _OPPOSITES[schedule.collective]
    phases = []
    for phase in reversed(schedule.phases):
        last = schedule.at(phase, phase.times - 1)
        step = Step.of(
            last.destination,
            last.source,
            last.chunk,
            "copy" if collective == "gather" else "reduce",
            last.count,
        )
        phases.append(Phase(step, phase.times, -phase.shift, phase.within))
    return Schedule(
        collective, algorithm, schedule.ranks, schedule.chunks, tuple(phases), schedule.root
    )
