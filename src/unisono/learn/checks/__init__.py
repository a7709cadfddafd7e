"""What the functions of the exercises must do.

A check has the name of the reader's function. It raises Wrong with a sentence for the reader; its
docstring is the hint for such an error.

requirements.py   Wrong; comparisons; a Communicator that records what it is asked
basics.py         chapters 1 to 6: ranks, collectives, algorithms, messages
training.py       chapters 7 to 12: overlap, groups, optimizers, attention, weights, mistakes
models.py         chapters 13 to 15: tensor, pipeline and expert parallelism
planning.py       chapters 16 to 18: memory, the roofline of communication, layouts
"""

from collections.abc import Callable
from typing import NamedTuple

from unisono.learn.checks import basics, models, planning, training


class FunctionCheck(NamedTuple):
    """What one function of the reader's must do, and the numbers of ranks on which it is tried;
    none: without a Communicator."""

    run: Callable[..., None]
    sizes: tuple[int, ...] = ()

    @property
    def function(self) -> str:
        return self.run.__name__

    @property
    def hint(self) -> str:
        return " ".join((self.run.__doc__ or "").split())


CHECKS: tuple[tuple[FunctionCheck, ...], ...] = (
    (FunctionCheck(basics.every_size_th), FunctionCheck(basics.my_share)),
    (FunctionCheck(basics.largest, (3,)), FunctionCheck(basics.transpose, (4,))),
    (FunctionCheck(basics.sum_in_halves, (4,)), FunctionCheck(basics.part_to_send)),
    (
        FunctionCheck(basics.ring_time),
        FunctionCheck(basics.tree_time),
        FunctionCheck(basics.crossover),
    ),
    (FunctionCheck(basics.children), FunctionCheck(basics.tree_broadcast, (1, 3, 8))),
    (FunctionCheck(basics.swap, (2, 4)), FunctionCheck(basics.ring_all_reduce, (1, 4))),
    (FunctionCheck(training.sum_meanwhile, (2,)), FunctionCheck(training.backward, (2,))),
    (FunctionCheck(training.my_half, (4,)), FunctionCheck(training.layout)),
    (FunctionCheck(training.average, (3,)), FunctionCheck(training.sharded_step, (1, 4))),
    (FunctionCheck(training.share_of_first), FunctionCheck(training.merge)),
    (FunctionCheck(training.all_agree, (3,)), FunctionCheck(training.update, (3,))),
    (FunctionCheck(training.mean_loss, (3,)), FunctionCheck(training.train, (2, 4))),
    (FunctionCheck(models.mlp, (2,)), FunctionCheck(models.mlp_backward, (2,))),
    (FunctionCheck(models.bubble), FunctionCheck(models.one_f_one_b)),
    (FunctionCheck(models.send_counts), FunctionCheck(models.through_experts, (2, 3))),
    (FunctionCheck(planning.bytes_per_parameter), FunctionCheck(planning.micro_batches)),
    (FunctionCheck(planning.is_bound_by_memory), FunctionCheck(planning.largest_tp)),
    (FunctionCheck(planning.is_inside_a_node), FunctionCheck(planning.choose)),
)
"""The checks of each chapter, the easy one first."""
