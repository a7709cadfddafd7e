"""Tensors in memory whose neighbours a collective must leave alone."""

from __future__ import annotations

from collections.abc import Callable

import torch

from torch_parity.arithmetic import CARRIERS

PART = 12
"""Elements of a part in the layouts that have rows and columns."""


class WrongResultError(AssertionError):
    """The elements are wrong."""


class ScratchedError(WrongResultError):
    """A rank that gets no result did not keep its own tensor."""


class OverwrittenError(AssertionError):
    """Memory next to the elements has changed."""


def part_size(layout: str, part: int = 0) -> int:
    """How many elements one rank's part has."""
    return {"empty": 0, "one": 1, "odd": 7, "uneven": 2 + 3 * part}.get(layout, PART)


def distinct(layout: str, count: int) -> int:
    """How many of a part's elements have memory of their own."""
    return count // 3 if layout == "expanded" else count


class Slab:
    """A tensor of `parts` parts in some layout, filled with `row` or with garbage."""

    def __init__(
        self,
        layout: str,
        dtype: torch.dtype,
        count: int,
        parts: int = 1,
        row: torch.Tensor | None = None,
    ) -> None:
        room, self._view = _view_of(layout, count, parts)
        self._base = torch.full((room,), 0x5A, dtype=CARRIERS[dtype.itemsize])
        if row is not None:
            elements = self._view(self._base)
            filled = elements[0] if layout == "expanded" else elements
            filled.copy_(row[: filled.numel()].reshape(filled.shape))
        self._before = self._base.clone()
        self.tensor = self._view(self._base.view(dtype))

    def must_hold(self, row: torch.Tensor) -> None:
        """Check that the elements are these, bit for bit, and that nothing next to them has
        changed."""
        outside = torch.ones(self._base.shape, dtype=torch.bool)
        self._view(outside).fill_(False)
        if not torch.equal(self._base[outside], self._before[outside]):
            raise OverwrittenError(
                f"{self._base[outside].tolist()} beside the elements and not "
                f"{self._before[outside].tolist()}"
            )
        if not torch.equal(self._view(self._base).reshape(-1), row):
            raise WrongResultError(
                f"{self._view(self._base).reshape(-1).tolist()} and not {row.tolist()}"
            )

    def must_be_unchanged(self) -> None:
        if not torch.equal(self._base, self._before):
            raise WrongResultError("a tensor that is only read has changed")


def _view_of(
    layout: str, count: int, parts: int
) -> tuple[int, Callable[[torch.Tensor], torch.Tensor]]:
    """The elements of memory that a layout needs, and the tensor in them. Parts follow one
    another along the first dimension."""
    every = count * parts
    if layout == "strided":
        return 2 * every, lambda base: base[::2]
    if layout == "transposed":
        return every, lambda base: base.view(count // 3, 3 * parts).t()
    if layout == "expanded":
        return count // 3, lambda base: base.expand(3 * parts, count // 3)
    if layout in ("one", "odd"):
        return every + 2, lambda base: base[1 : every + 1]
    if layout == "contiguous":
        return every, lambda base: base.view(3 * parts, count // 3)
    return every, lambda base: base
