"""Which layout of ranks trains a model fastest on a cluster, and what each costs (docs/layouts.md).

model.py     a transformer: its parameters, and the products and bytes of a layer
memory.py    what a rank must hold, part by part
roofline.py  how long computation takes; when communication takes longer
calls.py     how long a collective takes on a group of the mesh, by simulation
step.py      how long a training step takes, part by part
rank.py      all layouts that fit, the fastest first, and why
command.py   `unisono layout`
"""

from unisono.plan.layouts.memory import Layout, memory_by_part
from unisono.plan.layouts.model import Model, read_model
from unisono.plan.layouts.rank import LayoutRanking, explain_layout, rank_layouts
from unisono.plan.layouts.roofline import Against, against_the_wire, matmul_s
from unisono.plan.layouts.step import StepTime, step_time

__all__ = [
    "Against", "Layout", "LayoutRanking", "Model", "StepTime", "against_the_wire",
    "explain_layout", "matmul_s", "memory_by_part", "rank_layouts", "read_model", "step_time",
]  # fmt: skip
