"""What training programs do with the collectives.

agreement.py    one decision for all ranks: seeds, settings, early stops, rank 0 first
evaluate.py     results of uneven shards: in order, without duplicates, averaged exactly
weights.py      weights from a trainer to inference engines; weight_*.py stand behind it
"""

from unisono.training.agreement import agree, all_ranks, any_rank, main_process_first, sync_seed
from unisono.training.evaluate import gather_in_order, mean_over_samples
from unisono.training.weights import (
    WeightReceiver,
    WeightSender,
    WeightShard,
    WeightUpdate,
    weight_update,
)

__all__ = [
    "WeightReceiver",
    "WeightSender",
    "WeightShard",
    "WeightUpdate",
    "agree",
    "all_ranks",
    "any_rank",
    "gather_in_order",
    "main_process_first",
    "mean_over_samples",
    "sync_seed",
    "weight_update",
]
