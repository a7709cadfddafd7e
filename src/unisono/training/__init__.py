"""What training programs do with the collectives (docs/training.md).

gradients.py    gradients averaged while backward runs
clipping.py     gradients clipped by their norm over all ranks
buckets.py      which gradients are reduced together, and which ranks had none
ddp_buckets.py  DDP's buckets in shared memory
memory.py       memory that a group shares, and tensors that share storage
sharded.py      an optimizer whose work and state are sharded over the ranks
attention.py    attention over a sequence that is sharded over the ranks, by a ring or a double ring
tree_attention.py  the same queries on every rank, keys and values sharded: decoding
ulysses.py      the same by all_to_all between heads and positions, alone or with a ring
sequence.py     which positions a rank has, and what they see
exchange.py     all_to_all of rows, with gradients
experts.py      tokens sent to the ranks of their experts, and back
catching_up.py  gives a newcomer the training state
agreement.py    one decision for all ranks: seeds, settings, early stops, rank 0 first
evaluate.py     results of uneven shards: in order, without duplicates, averaged exactly
deferral.py     signals deferred until a block is done
weights/        new weights from trainers to inference engines (docs/weights.md)
"""

from unisono.torch_support import require_torch

require_torch(__name__)

from unisono.training.agreement import all_ranks, any_rank, main_process_first, sync_seed
from unisono.training.attention import ring_attention
from unisono.training.catching_up import catch_up
from unisono.training.clipping import clip_grad_norm
from unisono.training.ddp_buckets import compress_ddp_gradients, share_ddp_buckets
from unisono.training.evaluate import gather_in_order, mean_over_samples
from unisono.training.experts import (
    DispatchedTokens,
    ExpertParallel,
    combine_tokens,
    dispatch_tokens,
)
from unisono.training.gradients import GradientSync, sync_gradients
from unisono.training.sequence import shard_positions
from unisono.training.sharded import ShardedOptimizer
from unisono.training.tree_attention import tree_attention
from unisono.training.ulysses import ulysses_attention
from unisono.training.weights.by_parameter import (
    WeightUpdateExtension,
    WeightUpdateGroup,
    WeightUpdateWorker,
)
from unisono.training.weights.endpoints import (
    WeightReceiver,
    WeightSender,
    WeightShard,
    WeightUpdate,
    weight_update,
)
from unisono.training.weights.load_plan import LoadPlan
from unisono.training.weights.meeting import init_weight_update_group
from unisono.training.weights.quantized import QuantizedWeights
from unisono.training.weights.stateless import StatelessCommunicator, stateless_init_process_group

__all__ = [
    "DispatchedTokens", "ExpertParallel", "GradientSync", "LoadPlan", "QuantizedWeights",
    "ShardedOptimizer", "StatelessCommunicator", "WeightReceiver", "WeightSender", "WeightShard",
    "WeightUpdate", "WeightUpdateExtension", "WeightUpdateGroup", "WeightUpdateWorker",
    "all_ranks", "any_rank", "catch_up", "clip_grad_norm", "combine_tokens",
    "compress_ddp_gradients", "dispatch_tokens", "gather_in_order", "init_weight_update_group",
    "main_process_first", "mean_over_samples", "ring_attention", "shard_positions",
    "share_ddp_buckets", "stateless_init_process_group", "sync_gradients", "sync_seed",
    "tree_attention", "ulysses_attention", "weight_update",
]  # fmt: skip
