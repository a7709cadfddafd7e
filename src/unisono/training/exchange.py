"""all_to_all of rows with gradients, where both sides know the number of rows."""

from collections.abc import Sequence

import torch

from unisono.comm.communicator import Communicator
from unisono.torch_autograd import linear

Counts = Sequence[int]


def exchange_rows(
    comm: Communicator, rows: torch.Tensor, sent: Counts, received: Counts
) -> torch.Tensor:
    """The first `sent[0]` rows go to rank 0, the next `sent[1]` to rank 1, ...; the result has
    `received[0]` rows of rank 0, then `received[1]` of rank 1, ..."""

    def move(rows: torch.Tensor) -> torch.Tensor:
        arrived = rows.new_empty((sum(received), *rows.shape[1:]))
        comm.all_to_all(arrived.split_with_sizes(received), rows.detach().split_with_sizes(sent))
        return arrived

    # backward is the same exchange in the other direction
    return linear(move, lambda dy: [exchange_rows(comm, dy, received, sent)], rows)  # type: ignore[no-any-return]
