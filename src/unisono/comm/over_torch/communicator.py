"""The implementation over torch: any torch.distributed process group (gloo, nccl, mpi).

By the rules of all implementations: group ranks, tensors of any layout, every reduction of every
dtype for which it has a meaning, lists of different sizes. What a backend lacks is composed of what
it has. Sums of floats are taken in the backend's order, not in the order of ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from unisono import variables
from unisono.comm.arguments import LISTS, check_own_part, check_root
from unisono.comm.base import Communicator, Op, PremulSum, Tensor, Tensors, Work, count, dtype_name
from unisono.comm.by_algorithm import run_by
from unisono.comm.over_torch.arithmetic import choose_encoding
from unisono.comm.over_torch.group import Rows, WideSide, device_of
from unisono.comm.over_torch.messages import TorchMessages
from unisono.comm.over_torch.process_groups import new_group
from unisono.comm.over_torch.rows import (
    bytes_of,
    concatenate,
    copy_into,
    overlap,
    row_of,
    write_back,
)
from unisono.comm.over_torch.transport import ON_STREAMS
from unisono.errors import GroupClosed, RendezvousError, UnisonoError
from unisono.plan.schedule import Schedule


class TorchCommunicator(TorchMessages):
    """A process group of torch's as a Communicator."""

    def split(self, ranks: Sequence[int], label: str = "") -> Communicator | None:
        members = self._members(ranks)
        if self.rank not in members:
            return None
        self._faults.check()
        serial = self._splits[members, label] = self._splits.get((members, label), 0) + 1
        listed = f"{label}[{','.join(map(str, members))}]" + (f"/{serial}" if serial > 1 else "")
        name = f"{self.name}.{listed}" if label else f"{self.name}{listed}"
        try:
            return self._make_group(members, name)
        except UnisonoError:
            raise
        except RuntimeError as error:  # gloo connects the ranks at once: one may have ended
            raise RendezvousError(f"group {name} could not be made: {error}") from error

    def _make_group(self, members: Sequence[int], name: str) -> Communicator:
        """A group of these members, of whom this rank is one."""
        if getattr(dist.group.WORLD, "bound_device_id", None) is not None:
            raise UnisonoError(
                "a group whose world is bound to a device (init_process_group(device_id=...)) "
                "cannot be split by its members alone: call dist.new_group on all ranks"
            )
        parent = self._transport.group
        global_of = dist.get_process_group_ranks(parent)
        group = new_group(parent, [global_of[rank] for rank in members], name, self.timeout_s)
        made = TorchCommunicator(group, owns=True)
        if dist.get_backend(group) == dist.Backend.GLOO:
            made.barrier()  # who closes it at once would break off those that still connect
        return made

    def all_reduce(
        self,
        tensor: Tensors,
        op: Op = "sum",
        *,
        async_op: bool = False,
        algorithm: str | Schedule | None = None,
    ) -> Work | None:
        algorithm = algorithm or variables.ALGO.read()
        if algorithm:
            return run_by(algorithm, self, "all_reduce", tensor, None, 0, op, async_op)
        return self._reduce("all_reduce", tensor, None, op, async_op)

    def reduce(
        self,
        tensor: Tensors,
        root: int = 0,
        op: Op = "sum",
        *,
        async_op: bool = False,
        algorithm: str | Schedule | None = None,
    ) -> Work | None:
        if algorithm is not None:
            return run_by(algorithm, self, "reduce", tensor, None, root, op, async_op)
        self._checked("reduce", check_root, root, self.size)
        return self._reduce("reduce", tensor, root, op, async_op)

    def _reduce(
        self, what: str, tensor: Tensors, root: int | None, op: Op, async_op: bool
    ) -> Work | None:
        tensors = self._tensors(what, tensor, True)
        self._check_op(what, op, tensors)
        self._check_overlaps(what, tensors)
        alike = _by_dtype(tensors)
        where = "" if root is None else f" to rank {root}"
        call = self._call(f"{what} {_op_text(op)} of {_shapes(tensors)}{where}")

        def job() -> None:
            for same in alike:
                rows = [row_of(tensor) for tensor in same]
                result = self._reduced(
                    concatenate(rows), op, root, call.timeout_s, root is not None
                )
                if root in (None, self.rank):
                    copy_into(result, rows)
                    for tensor, row in zip(same, rows, strict=True):
                        write_back(tensor, row)

        return self._run(call, job, tensors, async_op)

    def _reduced(
        self, row: torch.Tensor, op: Op, root: int | None, timeout_s: float, keep: bool
    ) -> torch.Tensor:
        """The reduction of a row, in place where that is possible and `keep` does not forbid."""
        encoding = choose_encoding(op, row.dtype, self._transport.backend(row.device))
        wire = encoding.encode(row)
        if encoding.fold is not None:
            return encoding.decode(self._transport.fold(wire, encoding, timeout_s), self.size)
        if keep and wire.data_ptr() == row.data_ptr():
            wire = wire.clone()
        if root is None:
            self._transport.all_reduce(wire, encoding.op, timeout_s)
        else:
            self._transport.reduce(wire, root, encoding.op, timeout_s)
        return wire if encoding.is_plain else encoding.decode(wire, self.size)

    def broadcast(
        self,
        tensor: Tensors,
        root: int = 0,
        *,
        async_op: bool = False,
        algorithm: str | Schedule | None = None,
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
            self._transport.broadcast([whole], [root], call.timeout_s)
            if self.rank == root:
                return
            parts = torch.split(whole, [row.numel() for row in moved])
            for tensor, row, target, part in zip(tensors, rows, moved, parts, strict=True):
                copy_into(part, [target])  # in order: tied weights stand in many lists twice
                write_back(tensor, row)

        return self._run(call, job, tensors, async_op)

    def all_gather(
        self,
        output: Tensors,
        input: Tensors,
        *,
        async_op: bool = False,
        algorithm: str | Schedule | None = None,
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
            if len(set(lengths)) == 1:
                self._transport.all_gather(targets, message, call.timeout_s)
            else:
                targets[self.rank].copy_(message)
                self._transport.broadcast(targets, range(self.size), call.timeout_s)
            for target, rows in zip(targets, by_rank, strict=True):
                copy_into(target, rows)
            for side in outputs:
                side.write_back()

        return self._run(call, job, [*inputs, *results], async_op)

    def reduce_scatter(
        self,
        output: Tensors,
        input: Tensors,
        op: Op = "sum",
        *,
        async_op: bool = False,
        algorithm: str | Schedule | None = None,
    ) -> Work | None:
        if algorithm is not None:
            return run_by(algorithm, self, "reduce_scatter", output, input, 0, op, async_op)
        what = "reduce_scatter"
        narrow, wide = self._pairs(what, output, input, isinstance(output, LISTS))
        outputs = self._tensors(what, narrow, True)
        self._check_op(what, op, outputs)
        inputs = [WideSide(self, what, tensors, False) for tensors in wide]
        self._check_own_parts(what, inputs, outputs)
        given = [tensor for side in inputs for tensor in side.tensors]
        self._check_overlaps(what, outputs, given, isinstance(output, LISTS))
        counts = "; ".join(f"{side.dtype}{list(side.counts)}" for side in inputs)
        call = self._call(f"{what} {_op_text(op)} of {counts}")

        def job() -> None:
            for dtype in dict.fromkeys(side.dtype for side in inputs):
                same = [side.parts() for side in inputs if side.dtype == dtype]
                mine = [tensor for tensor in outputs if dtype_name(tensor) == dtype]
                by_rank = [
                    concatenate([parts[rank] for parts in same]) for rank in range(self.size)
                ]
                rows = [row_of(tensor) for tensor in mine]
                copy_into(self._scattered(by_rank, op, call.timeout_s), rows)
                for tensor, row in zip(mine, rows, strict=True):
                    write_back(tensor, row)

        return self._run(call, job, [*outputs, *given], async_op)

    def _scattered(self, by_rank: Rows, op: Op, timeout_s: float) -> torch.Tensor:
        """Our part of the reduction. gloo's own reduce_scatter is an all_reduce as well."""
        lengths = [part.numel() for part in by_rank]
        backend = self._transport.backend(by_rank[0].device)
        encoding = choose_encoding(op, by_rank[0].dtype, backend)
        if backend in ON_STREAMS and encoding.fold is None and len(set(lengths)) == 1:
            parts = [encoding.encode(part) for part in by_rank]
            result = torch.empty_like(parts[0])
            self._transport.reduce_scatter(result, parts, encoding.op, timeout_s)
            return encoding.decode(result, self.size)
        whole = self._reduced(torch.cat(by_rank), op, None, timeout_s, False)
        begin = sum(lengths[: self.rank])
        return whole[begin : begin + lengths[self.rank]]

    def gather(
        self, output: Tensors | None, input: Tensor, root: int = 0, *, async_op: bool = False
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

    def scatter(
        self, output: Tensor, input: Tensors | None, root: int = 0, *, async_op: bool = False
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

    def all_to_all(
        self,
        output: Tensors,
        input: Tensors,
        *,
        async_op: bool = False,
        algorithm: str | Schedule | None = None,
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
            self._transport.exchange(
                arriving,
                message,
                [taken * width for taken in takes],
                [sent * width for sent in sends],
                call.timeout_s,
            )
            if to:
                copy_into(arriving, to)
            for tensor, row in zip(outputs, rows, strict=True):
                write_back(tensor, row)

        return self._run(call, job, [*outputs, *inputs], async_op)

    def barrier(self, *, timeout_s: float | None = None, async_op: bool = False) -> Work | None:
        call = self._call("barrier", timeout_s=timeout_s)

        def job() -> None:
            if not self._checks:  # where calls are checked all ranks have met already
                self._transport.barrier(call.timeout_s)

        return self._run(call, job, [], async_op)


_wrapped: weakref.WeakKeyDictionary[Any, TorchCommunicator] = weakref.WeakKeyDictionary()


def wrap(group: Any) -> TorchCommunicator:
    """The Communicator of another library's process group: always the same, until somebody closes
    it or the group goes."""
    comm = _wrapped.get(group)
    if comm is None or isinstance(comm.errored, GroupClosed):
        comm = _wrapped[group] = TorchCommunicator(group, keep=False)
    return comm


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
    return "avg" if op == "mean" else op
