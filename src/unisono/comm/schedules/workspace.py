"""Where the chunks of a schedule lie on one rank, for each collective: before, during and after."""

from __future__ import annotations

from typing import Any

import numpy as np

from unisono.comm.on_rows.rows import Row, concatenate, copy_into, row_of, write_back_all
from unisono.comm.reductions import Reduction
from unisono.comm.schedules.arithmetic import copy_of, divide, empty_like, placed_like, scale
from unisono.comm.tensors import dtype_name
from unisono.plan.schedule import Schedule


class Workspace:
    """All chunks of a schedule as one row, `whole`, of which a rank may hold only some. It
    consists of equal blocks: one for each rank, or each pair of ranks, or one in all. A block
    consists of slices and a slice of chunks, both as equal as possible. `text` says in words
    what must be the same on all ranks besides the schedule. A side of several tensors counts as
    one."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        receives: bool,
        outputs: list[Any],
        inputs: list[Any],
        reduction: Reduction | None,
    ) -> None:
        self._primitive = schedule.primitive
        self._ranks, self._rank = schedule.ranks, rank
        self._is_root = rank == schedule.root
        self._blocks, self._chunks = schedule.blocks, schedule.chunks
        self._outputs, self._inputs = outputs, inputs
        self.op, self._factor = "sum", 1.0
        if self._primitive.is_empty:
            self.op, self.text = "bor", "nothing"
            like = outputs[0] if outputs else None  # messages must be on its device
            self.whole = placed_like(np.ones(schedule.chunks, np.uint8), like)
            self._elements = schedule.chunks
            return
        if reduction is not None:
            self.op, self._factor = reduction.name, reduction.factor
        self.whole = self._make_whole(receives)
        self._elements = len(self.whole)  # slow in torch
        self.text = f"{self._elements} elements of {dtype_name(self.whole)}"
        if reduction is not None:
            self.text += f", {reduction}"

    # -- before and after ------------------------------------------------------------------------

    def begin(self) -> None:
        if "output" in self._primitive.wide:
            self.whole[self._own()] = _row(self._inputs)
        if self.op == "premul_sum":
            scale(self.whole, self._factor)

    def end(self) -> None:
        if self._primitive.is_to_root and not self._is_root:
            return
        if self._primitive.wide == ("input",):
            result = self.whole[self._own()]
        elif len(self._primitive.wide) > 1:
            part = len(self.whole) // self._blocks
            pairs = self.whole.reshape(self._ranks, self._ranks, part)
            result = row_of(pairs[:, self._rank])
        else:
            result = self.whole
        if self.op == "avg":
            divide(result, self._ranks)
        if not self._primitive.is_empty:
            rows = list(map(row_of, self._outputs))
            copy_into(result, rows)
            write_back_all(self._outputs, rows)

    def _make_whole(self, receives: bool) -> Row:
        primitive, is_root = self._primitive, self._is_root
        if primitive.is_in_place:
            row = _row(self._outputs)
            is_kept = primitive.is_to_root and not is_root
            return copy_of(row) if is_kept and (receives or self._factor != 1) else row
        if primitive.wide == ("output",) and primitive.has_side("output", is_root):
            return _row(self._outputs)
        if primitive.wide == ("input",) and primitive.has_side("input", is_root):
            row = _row(self._inputs)
            return copy_of(row) if receives or primitive.reduces else row
        part = _row(self._outputs if primitive.is_from_root else self._inputs)
        return empty_like(part, len(part) * self._ranks)  # allocated when written

    def _own(self) -> slice:
        part = len(self.whole) // self._ranks
        return slice(self._rank * part, (self._rank + 1) * part)

    # -- where chunks lie ------------------------------------------------------------------------

    def slices(self, slice_bytes: int, most: int) -> int:
        """How many slices to cut the row into, so that each has about this many bytes."""
        size_bytes = self._elements * int(self.whole.itemsize)
        return max(1, min(most, size_bytes // slice_bytes))

    def spans(self, chunk: int, count: int, part: int, slices: int) -> list[tuple[int, int]]:
        """Where `count` chunks of slice `part` lie in the row: from which element up to which."""
        share = self._chunks // self._blocks
        length = self._elements // self._blocks
        first, last = _cut(length, slices, part), _cut(length, slices, part + 1)
        spans: list[tuple[int, int]] = []
        while count:
            block, inside = divmod(chunk, share)
            here = min(count, share - inside)
            start = block * length + first
            begin = start + _cut(last - first, share, inside)
            end = start + _cut(last - first, share, inside + here)
            if spans and spans[-1][1] == begin:
                spans[-1] = spans[-1][0], end
            else:
                spans.append((begin, end))
            chunk, count = chunk + here, count - here
        return spans


def _row(tensors: list[Any]) -> Row:
    return concatenate(list(map(row_of, tensors)))


def _cut(elements: int, parts: int, part: int) -> int:
    """Where part `part` begins; the first ones get the remainder."""
    return elements // parts * part + min(part, elements % parts)
