"""What training does with the primitives: weight updates (docs/weights.md)."""

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
    "weight_update",
]
