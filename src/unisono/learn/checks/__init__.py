"""What the functions of the exercises must do.

A check has the name of the reader's function. It raises Wrong with a sentence for the reader; its
docstring is the hint for such an error.

requirements.py   Wrong; comparisons; a Communicator that records what it is asked
basics.py         chapters 1 to 6: ranks, collectives, algorithms, messages
training.py       chapters 7 to 12: overlap, groups, optimizers, attention, weights, mistakes
models.py         chapters 13 to 15: tensor, pipeline and expert parallelism
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from unisono.learn.checks import basics, models, training


class Check(NamedTuple):
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


CHECKS: tuple[tuple[Check, ...], ...] = (
    (Check(basics.every_size_th), Check(basics.my_share)),
    (Check(basics.largest, (3,)), Check(basics.transpose, (4,))),
    (Check(basics.sum_in_halves, (4,)), Check(basics.part_to_send)),
    (Check(basics.ring_time), Check(basics.tree_time), Check(basics.crossover)),
    (Check(basics.children), Check(basics.tree_broadcast, (1, 3, 8))),
    (Check(basics.swap, (2, 4)), Check(basics.ring_all_reduce, (1, 4))),
    (Check(training.sum_meanwhile, (2,)), Check(training.backward, (2,))),
    (Check(training.my_half, (4,)), Check(training.layout)),
    (Check(training.average, (3,)), Check(training.sharded_step, (1, 4))),
    (Check(training.share_of_first), Check(training.merge)),
    (Check(training.all_agree, (3,)), Check(training.update, (3,))),
    (Check(training.mean_loss, (3,)), Check(training.train, (2, 4))),
    (Check(models.mlp, (2,)), Check(models.mlp_backward, (2,))),
    (Check(models.bubble), Check(models.one_f_one_b)),
    (Check(models.send_counts), Check(models.through_experts, (2, 3))),
)
"""The checks of each chapter, the easy one first."""
