"""The floor: what a rank must do with its own memory at least, done by all ranks at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from unisono.bench.backends.base import Buffers, Call, Case

NAME = "floor"


def floor_calls(case: Case, buffers: Buffers) -> Sequence[Call] | None:
    """A local add or copy of the bytes that the collective combines or moves; None if it has none.

    all_reduce, reduce, gradients: add a tensor to another. reduce_scatter: add all parts but one
    into one. all_gather, broadcast, all_to_all, messages: copy the size; gather and scatter too,
    for the root.
    """
    if not case.collective.sized:
        return None
    name = case.collective.name
    if name == "reduce_scatter":
        parts = buffers.parts("input", case.ranks)
        total = parts[0].clone()
        return [partial(_add_all, total, parts[1:] or parts)]
    wide = buffers.output if buffers.output.numel() >= buffers.input.numel() else buffers.input
    other = wide.new_zeros(wide.numel())
    if case.collective.reduces:
        return [partial(wide.add_, other)]
    return [partial(other.copy_, wide)]


def floor_bytes(case: Case, item_bytes: int) -> int:
    """How much memory a rank needs for it."""
    counts = case.collective.counts(case.size_bytes, item_bytes, case.ranks)
    wide = max(counts.output, counts.input)
    return item_bytes * (counts.output if case.collective.name == "reduce_scatter" else wide)


def _add_all(total: object, parts: Sequence[object]) -> None:
    for part in parts:
        total.add_(part)  # type: ignore[attr-defined]
