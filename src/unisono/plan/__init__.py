"""Communication without communicating: schedules, their proofs and their costs.

Pure Python and NumPy: no processes, no torch.

schedule.py       a collective algorithm as data; proof.py: it does what its collective promises
expectations.py   what each rank has after a collective, as numbers
catalog.py        the list of algorithms; algorithms/: one page each
topology.py       ranks, nodes, links; simulate.py: a schedule on them
in_network.py     an all_reduce by switches that add (NVLS, SHARP)
nccl.py           what NCCL would choose, and how long it expects that to take (docs/nccl.md)
choose.py         which algorithm is fastest, and why; complexity.py: steps, bytes and time of all
predict.py        from a few measured times to what all others should be
mesh.py           named axes over ranks: who is with whom (docs/groups.md)
player.py         schedules that play, as pages; layout.py: where their ranks stand
draw.py           schedules as pictures; sizes.py: sizes as people write them
command.py        `unisono plan`; tables.py: what it shows
"""

from unisono.errors import ScheduleError
from unisono.plan.catalog import Algorithm, algorithm, catalog, find
from unisono.plan.choose import Choice, Ranking, explain, rank_algorithms
from unisono.plan.complexity import Cost, costs
from unisono.plan.in_network import InNetwork, reduce_in_network
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
    "InNetwork",
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
    "reduce_in_network",
    "simulate",
    "verify",
]
