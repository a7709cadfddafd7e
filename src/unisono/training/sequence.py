"""Which positions of a cut sequence each rank has, and which of its queries see which keys.

In contiguous order rank r has the r-th part. Under a causal mask the last rank then computes the
most and all others wait for it. In zigzag order the sequence is cut into 2 n parts, of which rank r
of n has parts r and 2 n - 1 - r: an early one with little to see and a late one with much. All
ranks compute equally much in every step of a ring (zigzag: Zhu, ring-flash-attention, 2024; the
first balanced order: Brandon et al., Striped Attention, 2023).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from types import EllipsisType

import torch

from unisono.comm.communicator import Communicator, Group
from unisono.world.world import resolve

ORDERS = ("contiguous", "zigzag")
Rows = tuple[EllipsisType, slice, slice]
"""The index of some positions in a tensor that ends with positions and width."""


def shard_positions(
    length: int, *, context: Group = None, heads: Group = None, order: str = "contiguous"
) -> torch.Tensor:
    """The positions of this rank in a sequence of `length`, as a row of int64.

    `context` is the group of `ring_attention`, `heads` that of `ulysses_attention`, and `order`
    theirs: "contiguous" or "zigzag". With both groups the ranks of `heads` have consecutive parts
    of what one rank of `context` would have. None is a way in which the sequence is not cut. Parts
    differ by one position where `length` cannot be cut evenly.

    Use them to cut the tokens, the targets and the position embeddings. Raises ValueError for an
    unknown order or a negative length.

    >>> mine = unisono.training.shard_positions(8, context=comm, order="zigzag")
    >>> mine.tolist() == ([0, 1, 6, 7] if comm.rank == 0 else [2, 3, 4, 5])
    True
    """
    if order not in ORDERS:
        raise ValueError(unknown_order(order))
    if length < 0:
        raise ValueError(f"a sequence cannot have {length} positions")
    mine = torch.arange(length)
    if context is not None:
        comm = resolve(context)
        spans = _spans_of_ranks(length, comm.size, order)[comm.rank]
        mine = torch.cat([mine[span.start : span.stop] for span in spans])
    if heads is not None:
        comm = resolve(heads)
        mine = mine.tensor_split(comm.size)[comm.rank]
    return mine


def unknown_order(order: object) -> str:
    return f'order is {order!r}: use "contiguous" or "zigzag"'


def spans_of(comm: Communicator, lengths: Sequence[int], order: str) -> list[list[range]]:
    """The positions of each rank as ranges, where the ranks have these many. Raises ValueError,
    on every rank, where `order` would give a rank another number."""
    if order == "contiguous":  # of any lengths
        bounds = [0, *accumulate(lengths)]
        return [[range(begin, end)] for begin, end in pairwise(bounds)]
    spans = _spans_of_ranks(sum(lengths), comm.size, order)
    for rank, (own, length) in enumerate(zip(spans, lengths, strict=True)):
        if sum(map(len, own)) != length:
            raise ValueError(
                f"rank {rank} of group {comm.name} has {length} of {sum(lengths)} positions, in "
                f"zigzag order it would have {sum(map(len, own))}: cut the sequence by "
                "unisono.training.shard_positions"
            )
    return spans


def _spans_of_ranks(length: int, size: int, order: str) -> list[list[range]]:
    """As evenly as possible: the first parts are one longer, as in torch.tensor_split."""
    count = size if order == "contiguous" else 2 * size
    longer = length % count
    bounds = accumulate((length // count + (part < longer) for part in range(count)), initial=0)
    parts = [range(begin, end) for begin, end in pairwise(bounds)]
    if order == "contiguous":
        return [[part] for part in parts]
    return [[parts[rank], parts[-1 - rank]] for rank in range(size)]


def visible(
    queries: Sequence[range], keys: Sequence[range], causal: bool
) -> Iterator[tuple[Rows, Rows, bool]]:
    """Which rows of a rank's queries see which rows of a block of keys, and whether they see only
    those up to their own position."""
    for rows, mine in _placed(queries):
        for columns, theirs in _placed(keys):
            if not causal or theirs.start <= mine.start:
                yield rows, columns, causal and theirs.start == mine.start


def _placed(spans: Sequence[range]) -> Iterator[tuple[Rows, range]]:
    end = 0
    for span in spans:
        begin, end = end, end + len(span)
        if span:
            yield (..., slice(begin, end), slice(None)), span
