"""Early stopping: when one rank wants to stop, all stop after the same step.

A rank that left the loop alone would leave the others waiting in their next collective. any_rank
asks all ranks and gives all the same answer; all_ranks would go on until every rank wants to stop.

    unisono run -n 4 examples/early_stop.py
"""

from collections.abc import Callable

import torch

import unisono
from unisono.training import all_ranks, any_rank

STEPS = 50


def content_after(rank: int) -> int:
    """The step at which this rank would stop: no better loss, out of time, a NaN, ..."""
    return 7 + (3 * rank) % 5


def train(rank: int, vote: Callable[[bool], bool]) -> tuple[int, float]:
    """How many steps there were, and the sum of all ranks' work in the last one."""
    work = torch.zeros(1)
    for step in range(1, STEPS + 1):
        work = unisono.all_reduce(torch.ones(1) * step)  # needs every rank
        if vote(step >= content_after(rank)):
            break
    return step, work.item()


def main() -> None:
    comm = unisono.init()
    wishes = [content_after(rank) for rank in range(comm.size)]
    for vote, expected in ((any_rank, min(wishes)), (all_ranks, max(wishes))):
        step, work = train(comm.rank, vote)
        assert step == expected, f"{vote.__name__}: rank {comm.rank} stopped after {step} steps"
        assert work == expected * comm.size, f"a rank was missing in the last step: {work}"
        if comm.rank == 0:
            print(f"{vote.__name__}: all {comm.size} ranks stopped after step {step} of {STEPS}")
    unisono.shutdown()


if __name__ == "__main__":
    main()
