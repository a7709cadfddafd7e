"""What training programs do with the collectives.

gradients.py    gradients averaged while backward runs; buckets.py: what travels together
coalescing.py   many tensors in few messages
sharded.py      an optimizer whose state is cut over the ranks
attention.py    attention over a sequence that is cut over the ranks
"""

from unisono.training.coalescing import broadcast_many, reduce_many
from unisono.training.gradients import GradientReport, GradientSync, sync_gradients
from unisono.training.sharded import ShardedOptimizer

__all__ = [
    "GradientReport",
    "GradientSync",
    "ShardedOptimizer",
    "broadcast_many",
    "reduce_many",
    "sync_gradients",
]
