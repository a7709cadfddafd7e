"""Transports that move and reduce rows implement six primitives on rows of bytes. This module
turns any layout, lists and coalesced calls into rows, and writes the results back."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from unisono.comm.arguments import Call, WideSide, flatten
from unisono.comm.engine.numbers import Operation
from unisono.comm.on_rows.announced_calls import AnnouncedCall
from unisono.comm.on_rows.rows import (
    bytes_of,
    concatenate,
    copy_into,
    cut,
    overlap,
    torch_row_of,
    write_back,
    write_back_all,
)
from unisono.comm.reductions import Reduction
from unisono.comm.tensors import count, dtype_name
from unisono.comm.transport import Transport
from unisono.comm.work import Work

Rows = list[torch.Tensor]
Job = Callable[[], None]


class RowTransport(Transport):
    """A transport whose calls run on rows, once all ranks' calls match."""

    @abstractmethod
    def announce(
        self,
        text: str,
        sends: Sequence[int] = (),
        takes: Sequence[int] = (),
        timeout_s: float | None = None,
    ) -> AnnouncedCall:
        """What this rank announces to its peers about a call."""

    @abstractmethod
    def carry_out(
        self, call: AnnouncedCall, job: Job, tensors: list[Any], async_op: bool
    ) -> Work | None:
        """Run a call, at once or as a work."""

    @abstractmethod
    def reduce_row(
        self, row: torch.Tensor, op: Reduction, root: int | None, call: AnnouncedCall, keep: bool
    ) -> torch.Tensor:
        """The reduction of a row: on `root`, or on all ranks; in place if possible, unless
        `keep`."""

    @abstractmethod
    def scatter_rows(self, by_rank: Rows, op: Reduction, call: AnnouncedCall) -> torch.Tensor:
        """Our part of the reduction of all ranks' rows; each has one row for each rank."""

    def broadcast_row(self, row: torch.Tensor, root: int, call: AnnouncedCall) -> None:
        """A row of bytes becomes the root's. A transport has this, or its own `broadcast_rows`
        that does not need it."""
        raise NotImplementedError

    def broadcast_rows(
        self, tensors: Sequence[Any], rows: Rows, root: int, call: AnnouncedCall
    ) -> None:
        """Tensors with these rows become the root's: in one message, unless a transport needs
        none. They are written in order: lists may contain tied weights twice."""
        moved = list(map(bytes_of, rows))
        whole = concatenate(moved)
        self.broadcast_row(whole, root, call)
        if self.rank == root:
            return
        parts = torch.split(whole, [row.numel() for row in moved])
        for tensor, row, target, part in zip(tensors, rows, moved, parts, strict=True):
            copy_into(part, [target])
            write_back(tensor, row)

    @abstractmethod
    def gather_rows(self, targets: Rows, row: torch.Tensor, call: AnnouncedCall) -> None:
        """Each target becomes its rank's row of bytes."""

    @abstractmethod
    def exchange_rows(
        self, output: torch.Tensor, input: torch.Tensor, width: int, call: AnnouncedCall
    ) -> None:
        """Send each rank its part of `input`, and receive each rank's: bytes, of which an element
        has `width`. The call says how many elements."""

    @abstractmethod
    def meet(self, call: AnnouncedCall) -> None:
        """Return once all ranks have arrived."""

    # -- calls on rows ---------------------------------------------------------------------------

    def run(self, call: Call, async_op: bool) -> Work | None:
        return _ON_ROWS[call.operation](self, call, async_op)

    def barrier(self, timeout_s: float | None, async_op: bool) -> Work | None:
        call = self.announce("barrier", timeout_s=timeout_s)
        return self.carry_out(call, lambda: self.meet(call), [], async_op)


def _reduce(transport: RowTransport, call: Call, async_op: bool) -> Work | None:
    assert call.reduction is not None
    tensors, op = call.outputs, call.reduction
    root = call.root if call.operation == Operation.REDUCE else None
    where = "" if root is None else f" to rank {root}"
    announced = transport.announce(f"{call.name} {op} of {_shapes(tensors)}{where}")
    alike = _by_dtype(tensors)

    def job() -> None:
        for same in alike:
            rows = [torch_row_of(tensor) for tensor in same]
            whole = concatenate(rows)
            result = transport.reduce_row(whole, op, root, announced, root is not None)
            if root in (None, transport.rank):
                copy_into(result, rows)
                write_back_all(same, rows)

    return transport.carry_out(announced, job, tensors, async_op)


def _broadcast(transport: RowTransport, call: Call, async_op: bool) -> Work | None:
    tensors, root = call.outputs, call.root
    announced = transport.announce(f"broadcast of {_shapes(tensors)} from rank {root}")

    def job() -> None:
        rows = [torch_row_of(tensor) for tensor in tensors]
        if rows:
            transport.broadcast_rows(tensors, rows, root, announced)

    return transport.carry_out(announced, job, tensors, async_op)


def _all_gather(transport: RowTransport, call: Call, async_op: bool) -> Work | None:
    inputs, outputs = call.inputs, call.outputs
    announced = transport.announce(f"all_gather of {_counts(outputs)}")

    def job() -> None:
        if not inputs:
            return
        message = concatenate([bytes_of(torch_row_of(tensor)) for tensor in inputs])
        wide = [[torch_row_of(tensor) for tensor in side.tensors] for side in outputs]
        parts = [list(map(bytes_of, _parts(*pair))) for pair in zip(outputs, wide, strict=True)]
        by_rank = [[part[rank] for part in parts] for rank in range(transport.size)]
        lengths = [sum(part.numel() for part in rows) for rows in by_rank]
        targets = [
            rows[0] if len(rows) == 1 else message.new_empty(length)
            for rows, length in zip(by_rank, lengths, strict=True)
        ]
        transport.gather_rows(targets, message, announced)
        for target, rows in zip(targets, by_rank, strict=True):
            copy_into(target, rows)
        for side, rows in zip(outputs, wide, strict=True):
            write_back_all(side.tensors, rows)

    return transport.carry_out(announced, job, [*inputs, *flatten(outputs)], async_op)


def _reduce_scatter(transport: RowTransport, call: Call, async_op: bool) -> Work | None:
    assert call.reduction is not None
    op, outputs = call.reduction, call.outputs
    announced = transport.announce(f"reduce_scatter {op} of {_counts(call.inputs)}")

    def job() -> None:
        for dtype in dict.fromkeys(side.dtype for side in call.inputs):
            same = [
                _parts(side, [torch_row_of(tensor) for tensor in side.tensors])
                for side in call.inputs
                if side.dtype == dtype
            ]
            mine = [tensor for tensor in outputs if dtype_name(tensor) == dtype]
            by_rank = [
                concatenate([parts[rank] for parts in same]) for rank in range(transport.size)
            ]
            rows = [torch_row_of(tensor) for tensor in mine]
            copy_into(transport.scatter_rows(by_rank, op, announced), rows)
            write_back_all(mine, rows)

    return transport.carry_out(announced, job, call.tensors, async_op)


def _exchange(transport: RowTransport, call: Call, async_op: bool) -> Work | None:
    """Calls whose sizes differ between pairs of ranks."""
    nothing = [0] * transport.size

    def counts(sides: list[Any]) -> list[int]:
        if not sides:
            return nothing
        (side,) = sides
        if isinstance(side, WideSide):
            return list(side.counts)
        return [count(side) if rank == call.root else 0 for rank in range(transport.size)]

    takes, sends = counts(call.outputs), counts(call.inputs)
    outputs, inputs = flatten(call.outputs), flatten(call.inputs)
    where = {
        Operation.GATHER: f" to rank {call.root}",
        Operation.SCATTER: f" from rank {call.root}",
    }
    dtype = dtype_name((inputs or outputs)[0])
    text = f"{call.name} of {dtype}{where.get(call.operation, '')}"
    announced = transport.announce(text, sends, takes)
    device = device_of(call.tensors)

    def job() -> None:
        width = int(call.tensors[0].itemsize)
        rows = [torch_row_of(tensor) for tensor in outputs]
        to = [bytes_of(row) for row in rows]
        source = [bytes_of(torch_row_of(tensor)) for tensor in inputs]
        empty = torch.empty(0, dtype=torch.uint8, device=device)
        message = concatenate(source) if source else empty
        arriving = to[0] if len(to) == 1 else empty.new_empty(sum(takes) * width)
        if overlap(arriving, message):
            message = message.clone()
        transport.exchange_rows(arriving, message, width, announced)
        if to:
            copy_into(arriving, to)
        write_back_all(outputs, rows)

    return transport.carry_out(announced, job, call.tensors, async_op)


_ON_ROWS: dict[Operation, Callable[[RowTransport, Call, bool], Work | None]] = {
    Operation.ALL_REDUCE: _reduce,
    Operation.REDUCE: _reduce,
    Operation.BROADCAST: _broadcast,
    Operation.ALL_GATHER: _all_gather,
    Operation.REDUCE_SCATTER: _reduce_scatter,
    Operation.GATHER: _exchange,
    Operation.SCATTER: _exchange,
    Operation.ALL_TO_ALL: _exchange,
}


def _parts(side: WideSide, rows: Rows) -> Rows:
    """The rows of a wide side's tensors as rows for each rank."""
    return rows if side.is_list else cut(rows[0], len(side.counts))


def _by_dtype(tensors: list[Any]) -> list[list[Any]]:
    alike: dict[str, list[Any]] = {}
    for tensor in tensors:
        alike.setdefault(dtype_name(tensor), []).append(tensor)
    return list(alike.values())


def _shapes(tensors: Sequence[Any]) -> str:
    return ", ".join(f"{dtype_name(tensor)}[{count(tensor)}]" for tensor in tensors) or "nothing"


def _counts(sides: Sequence[WideSide]) -> str:
    return "; ".join(f"{side.dtype}{list(side.counts)}" for side in sides)


def device_of(tensors: Sequence[Any]) -> torch.device:
    """The device of tensors; arrays, and an empty list, are on the CPU."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            return tensor.device
    return torch.device("cpu")
