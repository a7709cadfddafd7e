"""Where the chunks of a schedule lie on one rank, for each collective: before, during and after."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from unisono.comm.arguments import check_overlaps, check_reduction, check_tensor
from unisono.comm.engine.numbers import Operation
from unisono.comm.schedules import flat
from unisono.comm.schedules.arithmetic import divide, scale
from unisono.comm.tensors import count, dtype_name
from unisono.plan.schedule import Schedule

_IN_PLACE = ("all_reduce", "broadcast", "reduce")
_REDUCING = ("all_reduce", "reduce", "reduce_scatter")
_PARTS_OF_BYTES = re.compile("u?int[1-7]")
_ANY_DEVICE = ("cpu", "cuda")
"""What a group cannot send, its messages refuse."""


class Workspace:
    """All chunks of a schedule as one row, `whole`, of which a rank may hold only some.

    The row consists of equal blocks, those that the collective itself is about: one for each rank,
    or each pair of ranks, or one in all. A block consists of slices and a slice of chunks, both as
    equal as may be. `text` says in words what all ranks must have in common beside the schedule.

    Raises ValueError or TypeError if the arguments do not fit the schedule's collective.
    """

    def __init__(
        self, schedule: Schedule, rank: int, receives: bool, output: Any, input: Any, op: Any
    ) -> None:
        self._collective = schedule.collective
        self._ranks, self._rank = schedule.ranks, rank
        self._is_root = rank == schedule.root
        self._blocks, self._chunks = schedule.blocks, schedule.chunks
        self._output, self._input = output, input
        self.op = "sum"
        self._factor = 1.0
        if self._collective == "barrier":
            self.op, self.text = "bor", "nothing"
            self.whole = _bytes_of_barrier(output, schedule.chunks)
            self._elements = schedule.chunks
            return
        self._check()
        like = input if output is None else output
        if self._collective in _REDUCING:
            reduction = check_reduction(op, [dtype_name(like)])
            self.op, self._factor = reduction.name, reduction.factor
        self.whole = self._make_whole(receives)
        self._elements = len(self.whole)  # torch takes its time to tell
        what = self.op if self.op != "premul_sum" else f"{self.op}({self._factor})"
        counted = f"{self._elements} elements of {dtype_name(like)}"
        self.text = counted + (f", {what}" if self._collective in _REDUCING else "")

    # -- before and after ------------------------------------------------------------------------

    def begin(self) -> None:
        """Put what this rank brings into the row."""
        if self._collective in ("all_gather", "gather"):
            self.whole[self._own()] = flat.flat(self._input)
        elif self._collective == "all_to_all":
            row = len(self.whole) // self._ranks
            self.whole[self._rank * row : (self._rank + 1) * row] = flat.flat(self._input)
        if self.op == "premul_sum":
            scale(self.whole, self._factor)

    def end(self) -> None:
        """Write what this rank gets to where it belongs."""
        if self._collective in ("reduce", "gather") and not self._is_root:
            return
        if self._collective in ("reduce_scatter", "scatter"):
            result = self.whole[self._own()]
        elif self._collective == "all_to_all":
            part = len(self.whole) // self._blocks
            pairs = self.whole.reshape(self._ranks, self._ranks, part)
            result = flat.flat(pairs[:, self._rank])
        else:
            result = self.whole
        if self.op == "avg":
            divide(result, self._ranks)
        if self._collective != "barrier":
            flat.write_back(self._output, result)

    def _make_whole(self, receives: bool) -> flat.Row:
        collective = self._collective
        if collective in _IN_PLACE:
            row = flat.flat(self._output)
            own = collective == "reduce" and not self._is_root and (receives or self._factor != 1)
            return flat.copy_of(row) if own else row
        if collective == "reduce_scatter":
            return flat.copy_of(flat.flat(self._input))
        if collective == "all_gather" or (collective == "gather" and self._is_root):
            return flat.flat(self._output)
        if collective == "scatter" and self._is_root:
            row = flat.flat(self._input)
            return flat.copy_of(row) if receives else row
        part = flat.flat(self._output if collective == "scatter" else self._input)
        return flat.empty_like(part, len(part) * self._ranks)  # memory that is used when written

    def _own(self) -> slice:
        part = len(self.whole) // self._ranks
        return slice(self._rank * part, (self._rank + 1) * part)

    # -- where chunks lie ------------------------------------------------------------------------

    def slices(self, slice_bytes: int, most: int) -> int:
        """In how many slices to cut the row, so that they have about so many bytes."""
        size_bytes = self._elements * int(self.whole.itemsize)
        return max(1, min(most, size_bytes // slice_bytes))

    def spans(self, chunk: int, count: int, part: int, slices: int) -> list[tuple[int, int]]:
        """Where `count` chunks of slice `part` lie in the row: from which element up to which.

        Chunks of one block lie side by side; those of several blocks only if there is one slice.
        """
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

    # -- what makes no sense ---------------------------------------------------------------------

    def _check(self) -> None:
        collective, output, input = self._collective, self._output, self._input
        wants_output = collective != "gather" or self._is_root
        wants_input = collective not in _IN_PLACE and (collective != "scatter" or self._is_root)
        for tensor, wanted, side in (
            (output, wants_output, "output"),
            (input, wants_input, "input"),
        ):
            if wanted and tensor is None:
                raise ValueError(f"a schedule needs an {side} on this rank")
            if not wanted and tensor is not None:
                raise ValueError(f"a schedule takes no {side} on this rank")
            if tensor is not None and not (hasattr(tensor, "dtype") and hasattr(tensor, "shape")):
                raise TypeError(
                    f"a schedule takes one tensor as {side}, not {type(tensor).__name__}"
                )
            if tensor is not None:
                check_tensor(tensor, side == "output", _ANY_DEVICE)
                if _PARTS_OF_BYTES.fullmatch(dtype_name(tensor)):
                    raise TypeError(
                        f"torch cannot copy elements of {dtype_name(tensor)}: pass "
                        ".view(torch.uint8)"
                    )
        if output is None or input is None:
            return
        if dtype_name(output) != dtype_name(input) or flat.is_torch(output) != flat.is_torch(input):
            raise TypeError("input and output have different dtypes")
        given, taken = count(input), count(output)
        if collective in ("all_gather", "gather"):
            given *= self._ranks
        elif collective in ("reduce_scatter", "scatter"):
            taken *= self._ranks
        if given != taken or (collective == "all_to_all" and given % self._ranks):
            raise ValueError(
                f"{count(input)} elements in the input and {count(output)} in the output do not "
                f"fit together on {self._ranks} ranks"
            )
        operation = Operation[collective.upper()]
        check_overlaps(operation, [output], [input], self._rank, self._ranks)


def _bytes_of_barrier(like: Any, chunks: int) -> flat.Row:
    """What the messages of a barrier carry: a byte for each chunk, where messages may lie."""
    if like is None or not flat.is_torch(like):
        return np.ones(chunks, np.uint8)
    import torch

    return torch.ones(chunks, dtype=torch.uint8, device=like.device)


def _cut(elements: int, parts: int, part: int) -> int:
    """Where part `part` begins; the first ones get what is left over."""
    return elements // parts * part + min(part, elements % parts)
