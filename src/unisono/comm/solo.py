"""The solo implementation of the Communicator: one rank, alone, by the same rules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from unisono import variables
from unisono.comm import flat
from unisono.comm.arguments import (
    LISTS,
    NotARank,
    check_coalesced,
    check_own_part,
    check_parts,
    check_reduction,
    check_root,
    check_tensor,
    check_wide_side,
)
from unisono.comm.arithmetic import scale
from unisono.comm.base import (
    DEFAULT_TIMEOUT_S,
    AnyOp,
    Communicator,
    Work,
    count,
    dtype_name,
)
from unisono.comm.overlaps import overlap_complaint
from unisono.comm.work import FinishedWork
from unisono.errors import GroupAborted, GroupClosed, GroupError

if TYPE_CHECKING:
    from unisono.comm.base import Algorithm, Tensor, Tensors
    from unisono.plan.schedule import Schedule

_T = TypeVar("_T")
_DEVICES = ("cpu", "cuda")
"""A group of one stands for every implementation: for those of GPUs, too."""


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
        self._decisions: dict[int, int] = {}
        self._algorithm = variables.ALGO.read()

    def all_reduce(
        self,
        tensor: Tensors,
        op: AnyOp = "sum",
        *,
        async_op: bool = False,
        algorithm: str | Schedule | None = None,
    ) -> Work | None:
        algorithm = algorithm or self._algorithm
        if algorithm:
            self._check_algorithm("all_reduce", algorithm)
        return self._reduce("all_reduce", tensor, op, async_op)

    def _run_reduce(
        self, tensor: Tensors, root: int, op: AnyOp, async_op: bool, algorithm: Algorithm
    ) -> Work | None:
        if algorithm is not None:
            self._check_algorithm("reduce", algorithm, async_op)
        self._checked("reduce", check_root, root, 1)
        return self._reduce("reduce", tensor, op, async_op)

    def _run_broadcast(
        self, tensor: Tensors, root: int, async_op: bool, algorithm: Algorithm
    ) -> Work | None:
        if algorithm is not None:
            self._check_algorithm("broadcast", algorithm, async_op)
        self._checked("broadcast", check_root, root, 1)
        self._check_overlaps("broadcast", self._tensors("broadcast", tensor, writable=True))
        return _finished(async_op)

    def _run_all_gather(
        self, output: Tensors, input: Tensors, async_op: bool, algorithm: Algorithm
    ) -> Work | None:
        if algorithm is not None:
            self._check_algorithm("all_gather", algorithm, async_op)
        return self._copy("all_gather", output, input, async_op, isinstance(input, LISTS))

    def _run_reduce_scatter(
        self, output: Tensors, input: Tensors, op: AnyOp, async_op: bool, algorithm: Algorithm
    ) -> Work | None:
        if algorithm is not None:
            self._check_algorithm("reduce_scatter", algorithm, async_op)
        self._factor("reduce_scatter", self._tensors("reduce_scatter", output, True), op)
        self._copy("reduce_scatter", output, input, async_op, isinstance(output, LISTS))
        return self._reduce("reduce_scatter", output, op, async_op)

    def _run_gather(
        self, output: Tensors | None, input: Tensor, root: int, async_op: bool
    ) -> Work | None:
        self._checked("gather", check_wide_side, root, 0, 1, output, "output")
        return self._copy("gather", output, input, async_op)

    def _run_scatter(
        self, output: Tensor, input: Tensors | None, root: int, async_op: bool
    ) -> Work | None:
        self._checked("scatter", check_wide_side, root, 0, 1, input, "input")
        return self._copy("scatter", output, input, async_op)

    def _run_all_to_all(
        self, output: Tensors, input: Tensors, async_op: bool, algorithm: Algorithm
    ) -> Work | None:
        if algorithm is not None:
            self._check_algorithm("all_to_all", algorithm, async_op)
        return self._copy("all_to_all", output, input, async_op)

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        self._nobody("send")

    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> int:
        self._nobody("recv")

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Work:
        self._nobody("send")

    def irecv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> Work:
        self._nobody("recv")

    def _nobody(self, what: str) -> NoReturn:
        self._raise_if_ended()
        self._refuse(what, "there is nobody else in a group of one")

    def barrier(self, *, timeout_s: float | None = None, async_op: bool = False) -> Work | None:
        self._raise_if_ended()
        return _finished(async_op)

    def split(self, ranks: Sequence[int], label: str = "") -> Communicator | None:
        self._raise_if_ended()
        name = self._name_split(self._members(ranks), label)
        return SoloCommunicator(name, self.global_ranks, self.timeout_s)

    def refuse(self, operation: str, why: str) -> NoReturn:
        self._raise_if_ended()
        self._refuse(operation, why)

    def abort(self, reason: str = "") -> None:
        if self._ending is None:
            text = f"rank 0 ended group {self.name}" + (f": {reason}" if reason else "")
            self._ending = GroupAborted(text, rank=0, group=self.name, peer=0, reason=reason)

    def _decide(self, serial: int, value: int) -> int:
        return self._decisions.setdefault(serial, value)

    @property
    def errored(self) -> GroupError | None:
        return self._ending

    def close(self) -> None:
        self._ending = GroupClosed(f"group {self.name} is closed", rank=0, group=self.name)

    # -- what stands behind them -----------------------------------------------------------------

    def _refuse(self, operation: str, why: str, kind: type[Exception] = ValueError) -> NoReturn:
        raise kind(f"{operation} on group {self.name}: {why}") from None

    def _checked(self, operation: str, check: Callable[..., _T], *arguments: Any) -> _T:
        """What a check of `arguments` returns, or its refusal as this group's."""
        self._raise_if_ended()
        try:
            return check(*arguments)
        except NotARank as error:
            self._refuse(operation, error.among(self.global_ranks))
        except (ValueError, TypeError) as error:
            self._refuse(operation, str(error), type(error))

    def _raise_if_ended(self) -> None:
        if self._ending is not None:
            raise copy.copy(self._ending)

    def _tensors(self, what: str, tensors: Any, writable: bool) -> list[Any]:
        """The tensors of one argument, checked."""
        self._raise_if_ended()
        many = list(tensors) if isinstance(tensors, LISTS) else [tensors]
        for tensor in many:
            self._checked(what, check_tensor, tensor, writable, _DEVICES)
        return many

    def _copy(
        self, what: str, output: Any, input: Any, async_op: bool, coalesced: bool = False
    ) -> Work | None:
        if coalesced:
            self._checked(what, check_coalesced, output, input)
        outputs = self._tensors(what, output, True)
        inputs = self._tensors(what, input, False)
        if not coalesced:
            for side, tensors in ((output, outputs), (input, inputs)):
                self._checked(what, check_parts, tensors, 1, isinstance(side, LISTS))
        for to, source in zip(outputs, inputs, strict=True):
            dtypes = dtype_name(source), dtype_name(to)
            self._checked(what, check_own_part, count(source), count(to), dtypes)
        self._check_overlaps(what, outputs, inputs, coalesced)
        for to, source in zip(outputs, inputs, strict=True):
            _assign(to, source)
        return _finished(async_op)

    def _check_overlaps(
        self, what: str, outputs: list[Any], inputs: Sequence[Any] = (), coalesced: bool = False
    ) -> None:
        why = overlap_complaint(what, outputs, inputs, coalesced=coalesced)
        if why:
            self._refuse(what, why)

    def _check_algorithm(
        self, collective: str, algorithm: str | Schedule, async_op: bool = False
    ) -> None:
        from unisono.comm.compiled_schedules import compile_schedule, schedule_for

        try:
            schedule = schedule_for(collective, algorithm, 1)
            compile_schedule(schedule, 0)
            if async_op:
                raise ValueError(f"{schedule.algorithm} over messages has no async_op here")
        except ValueError as error:
            self._refuse(collective, str(error))

    def _factor(self, what: str, tensors: list[Any], op: AnyOp) -> float:
        return self._checked(what, check_reduction, op, map(dtype_name, tensors))[1]

    def _reduce(self, what: str, tensor: Any, op: AnyOp, async_op: bool) -> Work | None:
        tensors = self._tensors(what, tensor, True)
        factor = self._factor(what, tensors, op)
        self._check_overlaps(what, tensors)
        if factor != 1.0:
            for each in tensors:
                row = flat.flat(each)
                scale(row, factor)
                flat.write_back(each, row)
        return _finished(async_op)


def _finished(async_op: bool) -> Work | None:
    return FinishedWork() if async_op else None


def _assign(to: Any, source: Any) -> None:
    if not hasattr(to, "detach"):
        row = flat.flat(source)
        to[...] = (row.numpy() if flat.is_torch(row) else row).reshape(to.shape)
        return
    import torch

    source = torch.as_tensor(source).detach().reshape(to.shape)
    try:
        to.detach().copy_(source)
    except NotImplementedError:  # torch has dtypes (int1, ...) that it cannot copy: move bytes
        to.detach().view(torch.uint8).copy_(source.view(torch.uint8))
