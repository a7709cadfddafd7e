"""Gathering tensors whose shapes only their owners know.

Every rank says first what it has: one *card* a rank, of a fixed size, with dtype, shape and, where
they fit, the elements themselves. If all fit, that one message was all. Otherwise a second one
moves the elements into tensors of the right shapes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from unisono.collectives.results import over
from unisono.comm.base import Communicator

_DIMS = 8
_WORDS = 2 + _DIMS
_LAYOUT = struct.Struct(f"={_WORDS}q")
_INLINE_BYTES = 944
CARD_BYTES = _LAYOUT.size + _INLINE_BYTES
"""1 KiB: the largest message that costs hardly more than an empty one."""


@dataclass(frozen=True)
class Card:
    """What a rank has: a dtype by its number, and a shape."""

    dtype_number: int
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return _dtypes()[self.dtype_number]

    @property
    def nbytes(self) -> int:
        count = 1
        for length in self.shape:
            count *= length
        return count * self.dtype.itemsize

    def empty(self, device: Any) -> torch.Tensor:
        """A tensor for what the card describes."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def all_gather(comm: Communicator, tensor: torch.Tensor, async_op: bool = False) -> Any:
    """Every rank's tensor, in rank order, whatever its shape and dtype."""
    cards, inline = _meet(comm, tensor)
    if inline is not None:
        return over(None, async_op, inline)
    outputs = [card.empty(tensor.device) for card in cards]
    if len({card.dtype_number for card in cards}) == 1:
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
    cards, inline = _meet(comm, tensor)
    outputs = None
    if comm.rank == dst and out is not None:
        outputs = [_fitting(comm, "gather", *pair) for pair in zip(cards, out, strict=True)]
    if inline is not None:
        if comm.rank != dst:
            return over(None, async_op, None)
        for output, part in zip(outputs or (), inline, strict=False):
            output.copy_(part)
        return over(None, async_op, outputs or inline)
    if comm.rank == dst and outputs is None:
        outputs = [card.empty(tensor.device) for card in cards]
    if len({card.dtype_number for card in cards}) == 1:
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
    mine = torch.empty(_LONG_WORDS, dtype=torch.int64, device=device)
    comm.scatter(mine, None if tensors is None else _long_cards(tensors, device), src)
    card = _read(mine.tolist())
    output = card.empty(device) if out is None else _fitting(comm, "scatter", card, out)
    return over(comm.scatter(output, tensors, src, async_op=async_op), async_op, output)


def all_to_all(comm: Communicator, tensors: Sequence[torch.Tensor], async_op: bool = False) -> Any:
    """Tensor r of every rank's, on rank r, in rank order."""
    device = tensors[0].device
    words = torch.empty((comm.size, _LONG_WORDS), dtype=torch.int64, device=device)
    comm.all_to_all(words, _long_cards(tensors, device))
    outputs = [_read(row).empty(device) for row in words.tolist()]
    return over(comm.all_to_all(outputs, tensors, async_op=async_op), async_op, outputs)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a contiguous tensor as a row of bytes, in the same memory; of another one,
    a copy."""
    row = tensor.detach().resolve_conj().resolve_neg().contiguous().flatten()
    return row.view(torch.uint8)


# -- cards ---------------------------------------------------------------------------------------

_LONG_WORDS = 2 + 64
"""A card for the most dimensions that a tensor can have."""


def _meet(comm: Communicator, tensor: torch.Tensor) -> tuple[list[Card], list[torch.Tensor] | None]:
    """What every rank has, and the tensors themselves where all of them fitted onto the cards."""
    count = tensor.numel() * tensor.element_size()
    shape = tuple(tensor.shape)
    card = bytearray(CARD_BYTES)
    dims = shape if len(shape) <= _DIMS else ()
    _LAYOUT.pack_into(
        card, 0, _numbers()[tensor.dtype], len(shape), *dims, *(0,) * (_DIMS - len(dims))
    )
    mine = torch.frombuffer(card, dtype=torch.uint8)
    if 0 < count <= _INLINE_BYTES:
        mine[_LAYOUT.size : _LAYOUT.size + count] = as_bytes(tensor)
    everyone = torch.empty(comm.size * CARD_BYTES, dtype=torch.uint8, device=tensor.device)
    comm.all_gather(everyone, mine.to(tensor.device))
    here = everyone.cpu()
    raw = here.numpy().data
    words = [_LAYOUT.unpack_from(raw, rank * CARD_BYTES) for rank in range(comm.size)]
    if any(one[1] > _DIMS for one in words):
        cards = _meet_at_length(comm, tensor)
    else:
        cards = [_read(one) for one in words]
    if any(card.nbytes > _INLINE_BYTES for card in cards):
        return cards, None
    results = []
    for rank, has in enumerate(cards):
        begin = rank * CARD_BYTES + _LAYOUT.size
        part = everyone[begin : begin + has.nbytes]
        results.append(part.view(has.dtype).view(has.shape).clone())
    return cards, results


def _meet_at_length(comm: Communicator, tensor: torch.Tensor) -> list[Card]:
    words = torch.empty((comm.size, _LONG_WORDS), dtype=torch.int64, device=tensor.device)
    comm.all_gather(words, _long_cards([tensor], tensor.device))
    return [_read(row) for row in words.tolist()]


def _long_cards(tensors: Sequence[torch.Tensor], device: Any) -> torch.Tensor:
    rows = []
    for tensor in tensors:
        padding = _LONG_WORDS - 2 - tensor.dim()
        rows.append([_numbers()[tensor.dtype], tensor.dim(), *tensor.shape, *(0,) * padding])
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
