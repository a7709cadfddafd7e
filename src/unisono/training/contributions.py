"""Micro-batches as contributions: gradients whose bits do not depend on the number of ranks."""

from collections.abc import Sequence

import torch

from unisono.comm.communicator import Communicator
from unisono.training.memory import views_of


def share_of_contributions(count: int, comm: Communicator) -> range:
    """The numbers of this rank's contributions, in rank order. Raises ValueError if some rank has
    none, or the group does not have reproducible sums."""
    if not isinstance(count, int) or count < comm.size:
        raise ValueError(
            f"contribution_count={count!r}: each of {comm.size} ranks needs at least one"
        )
    if not comm.transport.has_forms:
        raise ValueError(f"contribution_count= needs the backend unisono, not {comm.backend}")
    first, last = (count * rank // comm.size for rank in (comm.rank, comm.rank + 1))
    return range(first, last)


class ContributionRows:
    """What each of this rank's contributions adds to a bucket of gradients: a row for each, with a
    1 at its end for each gradient that it lacks."""

    def __init__(self, count: int, flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        self.rows = [torch.zeros_like(flat) for _ in range(count)]
        self._views = [views_of(row, tensors) for row in self.rows]
        self._absent = [row[-len(tensors) :] for row in self.rows]

    def start_over(self) -> None:
        for row, absent in zip(self.rows, self._absent, strict=True):
            row.zero_()
            absent.fill_(1)

    def has(self, row: int, index: int) -> bool:
        return not self._absent[row][index]

    def add(self, row: int, index: int, gradient: torch.Tensor) -> None:
        self._views[row][index].copy_(gradient)
        self._absent[row][index] = 0

    def lacks(self, index: int) -> bool:
        """Whether one of them has no such gradient."""
        return any(bool(absent[index]) for absent in self._absent)
