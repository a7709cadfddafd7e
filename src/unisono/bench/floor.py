"""The floor of a row: the least that a rank must do with its own memory, done by all ranks at once
(docs/bench.md)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from unisono.bench.backends.base import Buffers, Call, Case

NAME = "floor"


def floor_calls(case: Case, buffers: Buffers) -> Sequence[Call] | None:
    """A local add or copy of the bytes that the collective combines or moves; None if there are
    none. A reduce_scatter adds all parts but one into one."""
    if case.collective.is_empty:
        return None
    if case.collective.name == "reduce_scatter":
        parts = buffers.parts("input", case.ranks)
        return [partial(_add_all, parts[0].clone(), parts[1:] or parts)]
    wide = buffers.output if buffers.output.numel() >= buffers.input.numel() else buffers.input
    other = wide.new_zeros(wide.numel())
    if case.collective.reduces:
        return [partial(wide.add_, other)]
    return [partial(other.copy_, wide)]


def floor_bytes(case: Case, item_bytes: int) -> int:
    counts = case.collective.counts(case.size_bytes, item_bytes, case.ranks)
    wide = max(counts.output, counts.input)
    return item_bytes * (counts.output if case.collective.name == "reduce_scatter" else wide)


def _add_all(total: Any, parts: Sequence[Any]) -> None:
    for part in parts:
        total.add_(part)
