"""The collectives in terms of a few that move or reduce rows: tensors of any layout, lists of
different sizes and coalesced calls become rows in one piece, and what rows have become is written
back."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from unisono import variables
from unisono.comm.announced_calls import AnnouncedCall
from unisono.comm.arguments import LISTS, check_own_part, check_root
from unisono.comm.base import (
    Algorithm,
    AnyOp,
    Op,
    PremulSum,
    Tensor,
    Tensors,
    Work,
    count,
    dtype_name,
)
from unisono.comm.by_algorithm import run_by
from unisono.comm.row_group import RowGroup, Rows, WideSide
from unisono.comm.rows import (
    bytes_of,
    concatenate,
    copy_into,
    overlap,
    row_of,
    write_back,
)
from unisono.plan.schedule import Schedule


class RowCollectives(RowGroup):
    """Collectives of a group that can move and reduce rows."""

    # -- what an implementation has --------------------------------------------------------------

    @abstractmethod
    def _call(
        self,
        text: str,
        sends: Sequence[int] = (),
        takes: Sequence[int] = (),
        timeout_s: float | None = None,
    ) -> AnnouncedCall:
        """What this rank tells its peers of a call."""

    @abstractmethod
    def _run(
        self, call: AnnouncedCall, job: Callable[[], None], tensors: list[Any], async_op: bool
    ) -> Work | None:
        """Have a call carried out, at once or as a work."""

    @abstractmethod
    def _reduced(
        self, row: torch.Tensor, op: Op, root: int | None, call: AnnouncedCall, keep: bool
    ) -> torch.Tensor:
        """The reduction of a row: for `root`, or for all; in place where that is possible and
        `keep` does not forbid it."""

    @abstractmethod
    def _scattered(self, by_rank: Rows, op: Op, call: AnnouncedCall) -> torch.Tensor:
        """Our part of the reduction of all ranks' rows, of which there is one for each rank."""

    @abstractmethod
    def _broadcast_row(self, row: torch.Tensor, root: int, call: AnnouncedCall) -> None:
        """A row of bytes becomes the root's."""

    @abstractmethod
    def _all_gather_rows(self, targets: Rows, row: torch.Tensor, call: AnnouncedCall) -> None:
        """Each target becomes its rank's row of bytes."""

    @abstractmethod
    def _exchange_rows(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        from_each: Sequence[int],
        to_each: Sequence[int],
        width: int,
        call: AnnouncedCall,
    ) -> None:
        """Send so many bytes of `input` to each rank, and receive so many from each. An element
        has `width` of them."""

    @abstractmethod
    def _barrier_rows(self, call: AnnouncedCall) -> None:
        """Return once all ranks have come."""

    # -- the collectives -------------------------------------------------------------------------

    def all_reduce(
        self,
        tensor: Tensors,
        op: AnyOp = "sum",
        *,
        async_op: bool = False,
        algorithm: str | Schedule | None = None,
    ) -> Work | None:
        algorithm = algorithm or variables.ALGO.read()
        if algorithm:
            return run_by(algorithm, self, "all_reduce", tensor, None, 0, op, async_op)
        return self._reduce("all_reduce", tensor, None, op, async_op)

    def _run_reduce(
        self, tensor: Tensors, root: int, op: AnyOp, async_op: bool, algorithm: Algorithm
    ) -> Work | None:
        if algorithm is not None:
            return run_by(algorithm, self, "reduce", tensor, None, root, op, async_op)
        self._checked("reduce", check_root, root, self.size)
        return self._reduce("reduce", tensor, root, op, async_op)

    def _reduce(
        self, what: str, tensor: Tensors, root: int | None, given: AnyOp, async_op: bool
    ) -> Work | None:
        tensors = self._tensors(what, tensor, True)
        op = self._check_op(what, given, tensors)
        self._check_overlaps(what, tensors)
        alike = _by_dtype(tensors)
        where = "" if root is None else f" to rank {root}"
        call = self._call(f"{what} {_op_text(op)} of {_shapes(tensors)}{where}")

        def job() -> None:
            for same in alike:
                rows = [row_of(tensor) for tensor in same]
                result = self._reduced(concatenate(rows), op, root, call, root is not None)
                if root in (None, self.rank):
                    copy_into(result, rows)
                    for tensor, row in zip(same, rows, strict=True):
                        write_back(tensor, row)

        return self._run(call, job, tensors, async_op)

    def _run_broadcast(
        self, tensor: Tensors, root: int, async_op: bool, algorithm: Algorithm
    ) -> Work | None:
        if algorithm is not None:
            return run_by(algorithm, self, "broadcast", tensor, None, root, async_op=async_op)
        self._checked("broadcast", check_root, root, self.size)
        tensors = self._tensors("broadcast", tensor, True)
        self._check_overlaps("broadcast", tensors)
        call = self._call(f"broadcast of {_shapes(tensors)} from rank {root}")

        def job() -> None:
            rows = [row_of(tensor) for tensor in tensors]
            moved = [bytes_of(row) for row in rows]
            if not moved:
                return
            whole = concatenate(moved)
            self._broadcast_row(whole, root, call)
            if self.rank == root:
                return
            parts = torch.split(whole, [row.numel() for row in moved])
            for tensor, row, target, part in zip(tensors, rows, moved, parts, strict=True):
                copy_into(part, [target])  # in order: tied weights stand in many lists twice
                write_back(tensor, row)

        return self._run(call, job, tensors, async_op)

    def _run_all_gather(
        self, output: Tensors, input: Tensors, async_op: bool, algorithm: Algorithm
    ) -> Work | None:
        if algorithm is not None:
            return run_by(algorithm, self, "all_gather", output, input, async_op=async_op)
        what = "all_gather"
        wide, narrow = self._pairs(what, output, input, isinstance(input, LISTS))
        inputs = self._tensors(what, narrow, False)
        outputs = [WideSide(self, what, tensors, True) for tensors in wide]
        self._check_own_parts(what, outputs, inputs)
        results = [tensor for side in outputs for tensor in side.tensors]
        self._check_overlaps(what, results, inputs, isinstance(input, LISTS))
        counts = "; ".join(f"{side.dtype}{list(side.counts)}" for side in outputs)
        call = self._call(f"{what} of {counts}")

        def job() -> None:
            if not inputs:
                return
            message = concatenate([bytes_of(row_of(tensor)) for tensor in inputs])
            parts = [[bytes_of(part) for part in side.parts()] for side in outputs]
            by_rank = [[part[rank] for part in parts] for rank in range(self.size)]
            lengths = [sum(part.numel() for part in rows) for rows in by_rank]
            targets = [
                rows[0] if len(rows) == 1 else message.new_empty(length)
                for rows, length in zip(by_rank, lengths, strict=True)
            ]
            self._all_gather_rows(targets, message, call)
            for target, rows in zip(targets, by_rank, strict=True):
                copy_into(target, rows)
            for side in outputs:
                side.write_back()

        return self._run(call, job, [*inputs, *results], async_op)

    def _run_reduce_scatter(
        self, output: Tensors, input: Tensors, op: AnyOp, async_op: bool, algorithm: Algorithm
    ) -> Work | None:
        if algorithm is not None:
            return run_by(algorithm, self, "reduce_scatter", output, input, 0, op, async_op)
        what = "reduce_scatter"
        narrow, wide = self._pairs(what, output, input, isinstance(output, LISTS))
        outputs = self._tensors(what, narrow, True)
        known = self._check_op(what, op, outputs)
        inputs = [WideSide(self, what, tensors, False) for tensors in wide]
        self._check_own_parts(what, inputs, outputs)
        given = [tensor for side in inputs for tensor in side.tensors]
        self._check_overlaps(what, outputs, given, isinstance(output, LISTS))
        counts = "; ".join(f"{side.dtype}{list(side.counts)}" for side in inputs)
        call = self._call(f"{what} {_op_text(known)} of {counts}")

        def job() -> None:
            for dtype in dict.fromkeys(side.dtype for side in inputs):
                same = [side.parts() for side in inputs if side.dtype == dtype]
                mine = [tensor for tensor in outputs if dtype_name(tensor) == dtype]
                by_rank = [
                    concatenate([parts[rank] for parts in same]) for rank in range(self.size)
                ]
                rows = [row_of(tensor) for tensor in mine]
                copy_into(self._scattered(by_rank, known, call), rows)
                for tensor, row in zip(mine, rows, strict=True):
                    write_back(tensor, row)

        return self._run(call, job, [*outputs, *given], async_op)

    def _run_gather(
        self, output: Tensors | None, input: Tensor, root: int, async_op: bool
    ) -> Work | None:
        self._check_wide_side("gather", root, output, "output")
        (source,) = self._tensors("gather", [input], False)
        wide = None if output is None else WideSide(self, "gather", output, True)
        if wide is not None:
            self._check_own_parts("gather", [wide], [source])
            self._check_overlaps("gather", wide.tensors, [source])
        sends = [count(source) if rank == root else 0 for rank in range(self.size)]
        takes = [0] * self.size if wide is None else list(wide.counts)
        text = f"gather of {dtype_name(source)} to rank {root}"
        return self._exchange(text, wide, [source], takes, sends, async_op)

    def _run_scatter(
        self, output: Tensor, input: Tensors | None, root: int, async_op: bool
    ) -> Work | None:
        self._check_wide_side("scatter", root, input, "input")
        (target,) = self._tensors("scatter", [output], True)
        wide = None if input is None else WideSide(self, "scatter", input, False)
        if wide is not None:
            self._check_own_parts("scatter", [wide], [target])
            self._check_overlaps("scatter", [target], wide.tensors)
        takes = [count(target) if rank == root else 0 for rank in range(self.size)]
        sends = [0] * self.size if wide is None else list(wide.counts)
        text = f"scatter of {dtype_name(target)} from rank {root}"
        return self._exchange(text, [target], wide, takes, sends, async_op)

    def _run_all_to_all(
        self, output: Tensors, input: Tensors, async_op: bool, algorithm: Algorithm
    ) -> Work | None:
        if algorithm is not None:
            return run_by(algorithm, self, "all_to_all", output, input, async_op=async_op)
        to = WideSide(self, "all_to_all", output, True)
        source = WideSide(self, "all_to_all", input, False)
        given, taken = source.counts[self.rank], to.counts[self.rank]
        self._checked("all_to_all", check_own_part, given, taken, (source.dtype, to.dtype))
        self._check_overlaps("all_to_all", to.tensors, [] if output is input else source.tensors)
        text = f"all_to_all of {source.dtype}"
        return self._exchange(text, to, source, list(to.counts), list(source.counts), async_op)

    def _exchange(
        self,
        text: str,
        output: WideSide | list[Any] | None,
        input: WideSide | list[Any] | None,
        takes: list[int],
        sends: list[int],
        async_op: bool,
    ) -> Work | None:
        """What is different for every pair of ranks: `takes` and `sends` in elements."""
        call = self._call(text, sends, takes)
        outputs = output.tensors if isinstance(output, WideSide) else list(output or ())
        inputs = input.tensors if isinstance(input, WideSide) else list(input or ())
        device = device_of([*outputs, *inputs])

        def job() -> None:
            width = _width([*outputs, *inputs])
            rows = [row_of(tensor) for tensor in outputs]
            to = [bytes_of(row) for row in rows]
            source = [bytes_of(row_of(tensor)) for tensor in inputs]
            nothing = torch.empty(0, dtype=torch.uint8, device=device)
            message = concatenate(source) if source else nothing
            arriving = to[0] if len(to) == 1 else nothing.new_empty(sum(takes) * width)
            if overlap(arriving, message):
                message = message.clone()
            self._exchange_rows(
                arriving,
                message,
                [taken * width for taken in takes],
                [sent * width for sent in sends],
                width,
                call,
            )
            if to:
                copy_into(arriving, to)
            for tensor, row in zip(outputs, rows, strict=True):
                write_back(tensor, row)

        return self._run(call, job, [*outputs, *inputs], async_op)

    def barrier(self, *, timeout_s: float | None = None, async_op: bool = False) -> Work | None:
        call = self._call("barrier", timeout_s=timeout_s)

        return self._run(call, lambda: self._barrier_rows(call), [], async_op)


def _width(tensors: Sequence[Any]) -> int:
    return next(
        int(tensor.element_size() if hasattr(tensor, "element_size") else tensor.itemsize)
        for tensor in tensors
    )


def _by_dtype(tensors: list[Any]) -> list[list[Any]]:
    alike: dict[str, list[Any]] = {}
    for tensor in tensors:
        alike.setdefault(dtype_name(tensor), []).append(tensor)
    return list(alike.values())


def _shapes(tensors: Sequence[Any]) -> str:
    return ", ".join(f"{dtype_name(tensor)}[{count(tensor)}]" for tensor in tensors) or "nothing"


def _op_text(op: Op) -> str:
    if isinstance(op, PremulSum):
        return f"premul_sum({op.factor})"
    return op


def device_of(tensors: Sequence[Any]) -> torch.device:
    """Where tensors lie; arrays, and nothing, lie with the CPU."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            return tensor.device
    return torch.device("cpu")
