"""Thinking about communication without communicating: schedules, their proofs and their costs.

Pure Python and NumPy: no processes, no torch.
"""

from unisono.errors import ScheduleError
from unisono.plan.catalog import Algorithm, algorithm, catalog, find
from unisono.plan.proof import verify
from unisono.plan.schedule import COLLECTIVES, Phase, Schedule, Step, Transfer

__all__ = [
    "COLLECTIVES",
    "Algorithm",
    "Phase",
    "Schedule",
    "ScheduleError",
    "Step",
    "Transfer",
    "algorithm",
    "catalog",
    "find",
    "verify",
]
