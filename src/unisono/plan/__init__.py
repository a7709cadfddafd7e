"""Collectives without processes: schedules, their proofs and their costs.

Pure Python and NumPy: no processes, no torch.

schedule.py       a collective algorithm as data; proof.py: proves that it is correct
catalog.py        the list of algorithms; algorithms/: one page each
topology.py       ranks, nodes, links; topologies/: presets; simulate.py: runs a schedule on them
choose.py         which algorithm is fastest, and why; complexity.py: the cost of each
predict.py        expected times for all sizes, from a few measured ones
mesh.py           named axes over ranks: which ranks form which groups (docs/groups.md)
player.py         animated schedules, as HTML pages; arrangement.py: where each rank is drawn
layouts/          which layout trains a model fastest, and what each costs (docs/layouts.md)
draw.py           schedules as pictures; sizes.py: sizes as people write them
command.py        `unisono plan`; tables.py: its tables and charts; progress.py: while it thinks
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
    "COLLECTIVES", "PRESETS", "Algorithm", "Choice", "Cost", "Phase", "Ranking", "Schedule",
    "ScheduleError", "Step", "Timeline", "Topology", "Transfer", "algorithm", "catalog", "costs",
    "explain", "find", "find_topology", "rank_algorithms", "simulate", "verify",
]  # fmt: skip
