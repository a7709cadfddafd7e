"""all_to_all of rows with gradients, where both sides know the number of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from unisono.comm.communicator import Communicator

Counts = Sequence[int]


class _Exchange(torch.autograd.Function):
    """Backward is the same exchange in the other direction."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, comm: Communicator, sent: Counts, received: Counts
    ) -> torch.Tensor:
        ctx.comm, ctx.sent, ctx.received = comm, sent, received
        arrived = rows.new_empty((sum(received), *rows.shape[1:]))
        comm.all_to_all(arrived.split_with_sizes(received), rows.detach().split_with_sizes(sent))
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return exchange_rows(ctx.comm, gradient, ctx.received, ctx.sent), None, None, None


def exchange_rows(
    comm: Communicator, rows: torch.Tensor, sent: Counts, received: Counts
) -> torch.Tensor:
    """The first `sent[0]` rows go to rank 0, the next `sent[1]` to rank 1, ...; the result has
    `received[0]` rows of rank 0, then `received[1]` of rank 1, ..."""
    result: torch.Tensor = _Exchange.apply(rows, comm, sent, received)  # type: ignore[no-untyped-call]
    return result
