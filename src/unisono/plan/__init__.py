"""Communication without communicating: schedules, their proofs and their costs.

Pure Python and NumPy: no processes, no torch.
"""

from unisono.errors import ScheduleError
from unisono.plan.catalog import Algorithm, algorithm, catalog, find
from unisono.plan.choose import Choice, Ranking, explain, rank_algorithms
from unisono.plan.complexity import Cost, costs
from unisono.plan.proof import verify
from unisono.plan.schedule import COLLECTIVES, Phase, Schedule, Step, Transfer
from unisono.plan.simulate import Timeline, simulate
from unisono.plan.topology import PRESETS, Topology, find_topology

__all__ = [
    "COLLECTIVES",
    "PRESETS",
    "Algorithm",
    "Choice",
    "Cost",
    "Phase",
    "Ranking",
    "Schedule",
    "ScheduleError",
    "Step",
    "Timeline",
    "Topology",
    "Transfer",
    "algorithm",
    "catalog",
    "costs",
    "explain",
    "find",
    "find_topology",
    "rank_algorithms",
    "simulate",
    "verify",
]
