"""Moving tensors whose shapes only their owners know.

Every rank says first what it has, in a few words: dtype and shape, its *card*. A second message
moves the elements into tensors of the right shapes. (To put small tensors onto their cards would
save that message, and costs more than it saves in packing and unpacking.)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from unisono.collectives.integers import all_gather_words
from unisono.collectives.results import over
from unisono.collectives.tensor_bytes import as_bytes
from unisono.comm.base import Communicator

_DIMS = 8
_MOST_DIMS = 64
"""A card has room for so many dimensions; for more there is a second, long one. torch knows no
tensor with more than 64."""
_PADDING = (0,) * _MOST_DIMS


class Card(NamedTuple):
    """What a rank has: a dtype by its number, and a shape."""

    dtype_number: int
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return _dtypes()[self.dtype_number]

    def empty(self, device: Any) -> torch.Tensor:
        """A tensor for what the card describes."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def empty_beside(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same where `tensor` lies, sooner where it is alike."""
        if self.shape == tensor.shape and self.dtype is tensor.dtype:
            return torch.empty_like(tensor, memory_format=torch.contiguous_format)
        return self.empty(tensor.device)


def all_gather(comm: Communicator, tensor: torch.Tensor, async_op: bool = False) -> Any:
    """Every rank's tensor, in rank order, whatever its shape and dtype."""
    cards = _meet(comm, tensor)
    outputs = [card.empty_beside(tensor) for card in cards]
    if _alike(cards):
        work = comm.all_gather(outputs, tensor, async_op=async_op)
    else:
        parts = [as_bytes(output) for output in outputs]
        work = comm.all_gather(parts, as_bytes(tensor), async_op=async_op)
    return over(work, async_op, outputs)


def gather(
    comm: Communicator,
    tensor: torch.Tensor,
    dst: int,
    out: Sequence[torch.Tensor] | None = None,
    async_op: bool = False,
) -> Any:
    """Every rank's tensor, in rank order, on rank `dst`, in `out` where it is given; None
    elsewhere."""
    cards = _meet(comm, tensor)
    outputs = None
    if comm.rank == dst and out is not None:
        outputs = [_fitting(comm, "gather", *pair) for pair in zip(cards, out, strict=True)]
    elif comm.rank == dst:
        outputs = [card.empty_beside(tensor) for card in cards]
    if _alike(cards):
        work = comm.gather(outputs, tensor, dst, async_op=async_op)
    else:
        parts = None if outputs is None else [as_bytes(output) for output in outputs]
        work = comm.gather(parts, as_bytes(tensor), dst, async_op=async_op)
    return over(work, async_op, outputs)


def scatter(
    comm: Communicator,
    tensors: Sequence[torch.Tensor] | None,
    src: int,
    out: torch.Tensor | None,
    device: Any,
    async_op: bool = False,
) -> Any:
    """Tensor r of rank `src`'s, on rank r, which learns from `src` what it gets."""
    mine = torch.empty(2 + _MOST_DIMS, dtype=torch.int64, device=device)
    comm.scatter(mine, None if tensors is None else _long_cards(tensors, device), src)
    card = _read(mine.tolist())
    output = card.empty(device) if out is None else _fitting(comm, "scatter", card, out)
    return over(comm.scatter(output, tensors, src, async_op=async_op), async_op, output)


def all_to_all(comm: Communicator, tensors: Sequence[torch.Tensor], async_op: bool = False) -> Any:
    """Tensor r of every rank's, on rank r, in rank order."""
    device = tensors[0].device
    words = torch.empty((comm.size, 2 + _MOST_DIMS), dtype=torch.int64, device=device)
    comm.all_to_all(words, _long_cards(tensors, device))
    outputs = [_read(row).empty(device) for row in words.tolist()]
    return over(comm.all_to_all(outputs, tensors, async_op=async_op), async_op, outputs)


# -- cards ---------------------------------------------------------------------------------------


def _meet(comm: Communicator, tensor: torch.Tensor) -> list[Card]:
    """What every rank has."""
    number, shape = _numbers()[tensor.dtype], tuple(tensor.shape)
    dims = shape if len(shape) <= _DIMS else ()
    words = (number, len(shape), *dims, *_PADDING[len(dims) : _DIMS])
    cards = all_gather_words(comm, words, tensor.device)
    if any(words[1] > _DIMS for words in cards):
        long = (number, len(shape), *shape, *_PADDING[len(shape) :])
        cards = all_gather_words(comm, long, tensor.device)
    return [_read(words) for words in cards]


def _alike(cards: list[Card]) -> bool:
    return all(card.dtype_number == cards[0].dtype_number for card in cards)


def _long_cards(tensors: Sequence[torch.Tensor], device: Any) -> torch.Tensor:
    rows = []
    for tensor in tensors:
        shape = tensor.shape
        rows.append([_numbers()[tensor.dtype], len(shape), *shape, *_PADDING[len(shape) :]])
    return torch.tensor(rows, dtype=torch.int64, device=device)


def _fitting(comm: Communicator, operation: str, card: Card, out: torch.Tensor) -> torch.Tensor:
    if out.dtype != card.dtype or tuple(out.shape) != card.shape:
        comm.refuse(
            operation,
            f"out is {out.dtype} of shape {tuple(out.shape)} for {card.dtype} of {card.shape}",
        )
    return out


def _read(words: Sequence[int]) -> Card:
    return Card(words[0], tuple(words[2 : 2 + words[1]]))


@cache
def _dtypes() -> list[torch.dtype]:
    """Every dtype of torch, in an order that is the same in every process."""
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return sorted(found, key=str)


@cache
def _numbers() -> dict[torch.dtype, int]:
    return {dtype: number for number, dtype in enumerate(_dtypes())}
