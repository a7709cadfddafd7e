"""The solo make of the Communicator: one rank, alone, by the same rules."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from unisono import variables
from unisono.comm.arguments import complaint, count, reduction_complaint
from unisono.comm.base import (
    DEFAULT_TIMEOUT_S,
    Communicator,
    Op,
    PremulSum,
    Work,
    dtype_name,
)
from unisono.comm.overlaps import overlap_complaint
from unisono.comm.work import FinishedWork
from unisono.errors import GroupAborted, GroupClosed, GroupError

if TYPE_CHECKING:
    from unisono.comm.base import Tensor, Tensors
    from unisono.plan.schedule import Schedule

_DEVICES = ("cpu", "cuda")
"""A group of one stands for every make: for those of GPUs, too."""


class SoloCommunicator(Communicator):
    """A group of one. Needs no engine and no other process; refuses what the others refuse."""

    def __init__(
        self,
        name: str = "world",
        global_ranks: tuple[int, ...] | None = (0,),
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self.rank = 0
        self.size = 1
        self.name = name
        self.global_ranks = global_ranks
        self.timeout_s = timeout_s
        self._ending: GroupError | None = None
        self._splits = 0
        self._algorithm = variables.ALGO.read()

    def all_reduce(
        self,
        tensor: Tensors,
        op: Op = "sum",
        *,
        async_op: bool = False,
        algorithm: str | Schedule | None = None,
    ) -> Work | None:
        algorithm = algorithm or self._algorithm
        if algorithm:
            self._check_algorithm(algorithm)
        self._reduce("all_reduce", tensor, op)
        return _over(async_op)

    def reduce(
        self, tensor: Tensors, root: int = 0, op: Op = "sum", *, async_op: bool = False
    ) -> Work | None:
        self._check("reduce", root)
        self._reduce("reduce", tensor, op)
        return _over(async_op)

    def broadcast(self, tensor: Tensors, root: int = 0, *, async_op: bool = False) -> Work | None:
        self._check("broadcast", root)
        self._check_overlaps("broadcast", self._tensors("broadcast", tensor, writable=True))
        return _over(async_op)

    def all_gather(self, output: Tensors, input: Tensors, *, async_op: bool = False) -> Work | None:
        coalesced = isinstance(input, (list, tuple))
        self._copy("all_gather", output, input, coalesced)
        return _over(async_op)

    def reduce_scatter(
        self, output: Tensors, input: Tensors, op: Op = "sum", *, async_op: bool = False
    ) -> Work | None:
        coalesced = isinstance(output, (list, tuple))
        self._check_op("reduce_scatter", self._tensors("reduce_scatter", output, True), op)
        self._copy("reduce_scatter", output, input, coalesced)
        self._reduce("reduce_scatter", output, op)
        return _over(async_op)

    def gather(
        self, output: Tensors | None, input: Tensor, root: int = 0, *, async_op: bool = False
    ) -> Work | None:
        self._check("gather", root)
        if output is None:
            self._refuse("gather", "the root must pass an output")
        self._copy("gather", output, input)
        return _over(async_op)

    def scatter(
        self, output: Tensor, input: Tensors | None, root: int = 0, *, async_op: bool = False
    ) -> Work | None:
        self._check("scatter", root)
        if input is None:
            self._refuse("scatter", "the root must pass an input")
        self._copy("scatter", output, input)
        return _over(async_op)

    def all_to_all(self, output: Tensors, input: Tensors, *, async_op: bool = False) -> Work | None:
        self._copy("all_to_all", output, input)
        return _over(async_op)

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        self._nobody("send")

    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> int:
        self._nobody("recv")

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Work:
        self._nobody("isend")

    def irecv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> Work:
        self._nobody("irecv")

    def _nobody(self, what: str) -> NoReturn:
        self._check(what)
        self._refuse(what, "there is nobody else in a group of one")

    def barrier(self, *, timeout_s: float | None = None, async_op: bool = False) -> Work | None:
        self._check("barrier")
        return _over(async_op)

    def split(self, ranks: Sequence[int], label: str = "") -> Communicator | None:
        self._check("split")
        if tuple(ranks) != (0,):
            raise ValueError(f"ranks {tuple(ranks)} do not all lie in a group of 1")
        self._splits += 1
        name = f"{self.name}.{label}[0]" if label else f"{self.name}[0]"
        name += f"/{self._splits}" if self._splits > 1 else ""
        return SoloCommunicator(name, self.global_ranks, self.timeout_s)

    def refuse(self, operation: str, why: str) -> NoReturn:
        self._check(operation)
        self._refuse(operation, why)

    def abort(self, reason: str = "") -> None:
        if self._ending is None:
            text = f"rank 0 ended group {self.name}" + (f": {reason}" if reason else "")
            self._ending = GroupAborted(text, rank=0, group=self.name, peer=0, reason=reason)

    @property
    def errored(self) -> GroupError | None:
        return self._ending

    def close(self) -> None:
        self._ending = GroupClosed(f"group {self.name} is closed", rank=0, group=self.name)

    # -- what stands behind them -----------------------------------------------------------------

    def _refuse(self, what: str, why: str, kind: type[Exception] = ValueError) -> NoReturn:
        raise kind(f"{what} on group {self.name}: {why}")

    def _check(self, what: str, root: int = 0) -> None:
        if self._ending is not None:
            raise copy.copy(self._ending)
        if root != 0 or not isinstance(root, int):
            self._refuse(what, f"root {root!r} is not a rank of a group of 1")

    def _tensors(self, what: str, tensors: Any, writable: bool) -> list[Any]:
        """The tensors of one argument, checked."""
        self._check(what)
        many = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
        for tensor in many:
            kind, why = complaint(tensor, writable, _DEVICES)
            if kind is not None:
                self._refuse(what, why, kind)
        return many

    def _copy(self, what: str, output: Any, input: Any, coalesced: bool = False) -> None:
        if coalesced and not (
            isinstance(output, (list, tuple)) and isinstance(input, (list, tuple))
        ):
            self._refuse(what, "a coalesced call takes a list on both sides", TypeError)
        outputs = self._tensors(what, output, True)
        inputs = self._tensors(what, input, False)
        if len(outputs) != len(inputs) or (not coalesced and len(outputs) != 1):
            self._refuse(what, f"{len(outputs)} outputs for {len(inputs)} inputs in a group of 1")
        for to, source in zip(outputs, inputs, strict=True):
            if dtype_name(to) != dtype_name(source):
                self._refuse(what, "input and output have different dtypes", TypeError)
            if count(to) != count(source):
                self._refuse(
                    what,
                    f"this rank's part has {count(source)} elements in the input and "
                    f"{count(to)} in the output",
                )
        self._check_overlaps(what, outputs, inputs, coalesced)
        for to, source in zip(outputs, inputs, strict=True):
            _assign(to, source)

    def _check_overlaps(
        self, what: str, outputs: list[Any], inputs: Sequence[Any] = (), coalesced: bool = False
    ) -> None:
        why = overlap_complaint(what, outputs, inputs, coalesced=coalesced)
        if why:
            self._refuse(what, why)

    def _check_algorithm(self, algorithm: str | Schedule) -> None:
        from unisono.comm.compiled_schedules import compile_schedule, schedule_for

        try:
            compile_schedule(schedule_for("all_reduce", algorithm, 1), 0)
        except ValueError as error:
            self._refuse("all_reduce", str(error))

    def _check_op(self, what: str, tensors: list[Any], op: Op) -> None:
        kind, why = reduction_complaint(op, tensors)
        if kind is not None:
            self._refuse(what, why, kind)

    def _reduce(self, what: str, tensor: Any, op: Op) -> None:
        tensors = self._tensors(what, tensor, True)
        self._check_op(what, tensors, op)
        self._check_overlaps(what, tensors)
        if isinstance(op, PremulSum):
            for one in tensors:
                _scale(one, float(op.factor))


def _over(async_op: bool) -> Work | None:
    return FinishedWork() if async_op else None


def _assign(to: Any, source: Any) -> None:
    if not hasattr(to, "detach"):
        to[...] = (source.numpy() if hasattr(source, "numpy") else source).reshape(to.shape)
        return
    import torch

    source = torch.as_tensor(source).detach().reshape(to.shape)
    try:
        to.detach().copy_(source)
    except NotImplementedError:  # torch has dtypes (int1, ...) that it cannot copy: move bytes
        to.detach().view(torch.uint8).copy_(source.view(torch.uint8))


def _scale(tensor: Any, factor: float) -> None:
    """Multiply in place as the engine does: integers wrap, half precision is rounded once, and
    complex numbers are scaled part by part."""
    if dtype_name(tensor).startswith("complex"):
        tensor = tensor.detach() if hasattr(tensor, "detach") else tensor
        _scale(tensor.real, factor)
        _scale(tensor.imag, factor)
        return
    dtype = dtype_name(tensor)
    if hasattr(tensor, "detach"):
        tensor = tensor.detach()
        if "int" not in dtype:
            wide = tensor.float() if dtype in ("float16", "bfloat16") else tensor
            tensor.copy_(wide * factor)
            return
        if tensor.device.type != "cpu":  # torch itself cannot multiply all integers
            copy_here = tensor.cpu()
            _scale(copy_here, factor)
            tensor.copy_(copy_here)
            return
        tensor = tensor.numpy()
    if "int" in dtype:
        number = np.array(int(factor)).astype(tensor.dtype)
    else:
        number = np.array(factor, dtype="float32" if dtype == "float16" else tensor.dtype)
    np.multiply(tensor, number, out=tensor, casting="unsafe")
