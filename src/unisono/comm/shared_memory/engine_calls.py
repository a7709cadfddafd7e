"""A collective's way to the engine: its arguments in the engine's words, its failures as ours."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from unisono.comm.base import (
    REDUCTIONS,
    TRUNCATED_AVG,
    AnyOp,
    Communicator,
    Op,
    PremulSum,
    Work,
    dtype_name,
    name_of_dtype,
)
from unisono.comm.engine import OnDevice, Operation
from unisono.comm.shared_memory.exceptions import GroupExceptions
from unisono.comm.work import join_works

if TYPE_CHECKING:
    from unisono.comm.engine_types import Group

REDUCTION_NUMBERS: dict[str, int] = {name: number for number, name in enumerate(REDUCTIONS)}
_PREMUL_SUM = len(REDUCTIONS)
REDUCTION_NUMBERS |= {"mean": REDUCTION_NUMBERS["avg"], TRUNCATED_AVG: _PREMUL_SUM + 1}
EngineCall = tuple[Operation, int, int, float, bytes | None]
"""What the engine is told of a call, its tensors aside: operation, root, reduction, factor and
compiled schedule. A plain tuple: to make a named one takes longer than the engine's whole call."""

# What checks arguments and sorts lists is imported where it is used: many programs never need it,
# and every process would pay for it as it starts.

LISTS = frozenset((list, tuple))  # asking for the type is several times faster than isinstance
_T = TypeVar("_T")


class GpuTensors(Communicator):
    """A group whose calls on CUDA tensors go on in `unisono.comm.cuda`."""

    _gpu: Any = None

    def _gpu_group(self) -> Communicator:
        """What carries out the calls of this group on tensors of a GPU, from the first one on."""
        if self._gpu is None:
            # By name, since it stands on this implementation, and needs torch.
            self._gpu = importlib.import_module("unisono.comm.cuda.group").GpuGroup(self)
        gpu: Communicator = self._gpu
        return gpu

    def _close_gpu_group(self) -> None:
        if self._gpu is not None:
            self._gpu.close()


class EngineCalls(GpuTensors):
    """How a group runs, refuses and fails its calls."""

    _group: Group
    _exceptions: GroupExceptions
    _native_run: Callable[..., int]
    _algorithm: str | None

    def _run(
        self, call: EngineCall, output: Any, input: Any, async_op: bool, coalesced: bool = False
    ) -> Work | None:
        operation, root, reduction, factor, schedule = call
        try:
            if async_op:
                work = self._group.submit(
                    self._exceptions,
                    operation,
                    output,
                    input,
                    root,
                    reduction,
                    factor,
                    coalesced,
                    schedule,
                )
                if isinstance(work, int):
                    raise self._exceptions.call_error(work, operation)
                return work
            status = self._native_run(
                operation, output, input, root, reduction, factor, coalesced, schedule
            )
        except OnDevice:
            return self._run_on_gpu(call, output, input, async_op)
        if status:
            self._fail(status, operation, reduction, output if input is None else input)
        return None

    def _run_lists(
        self, call: EngineCall, outputs: Any, inputs: Any, async_op: bool
    ) -> Work | None:
        """A coalesced call: one for each dtype."""
        from unisono.comm.arguments import check_coalesced
        from unisono.comm.shared_memory.dtypes import sort_by_dtype

        operation = call[0]
        self._checked(operation, check_coalesced, outputs, inputs)
        try:
            alike = self._checked(operation, sort_by_dtype, outputs, inputs)
        except OnDevice:
            return self._run_on_gpu(call, outputs, inputs, async_op)
        if not alike:
            self.barrier()  # nothing to move, but peers that have something must learn of it
        return join_works(
            self._run(call, alike_outputs, alike_inputs, async_op, True)
            for alike_outputs, alike_inputs in alike
        )

    def _run_on_gpu(self, call: EngineCall, output: Any, input: Any, async_op: bool) -> Work | None:
        operation, root, reduction, factor, schedule = call
        if schedule is not None and self._algorithm is None:
            self._refuse(operation, "an algorithm is for CPU tensors: pass none with CUDA tensors")
        op: Op = PremulSum(factor)
        if reduction != _PREMUL_SUM:
            op = REDUCTIONS[reduction] if reduction < _PREMUL_SUM else TRUNCATED_AVG
        gpu: Any = self._gpu_group()
        work: Work | None = gpu.run(operation, output, input, root, op, async_op)
        return work

    # -- refusing and failing --------------------------------------------------------------------

    def _reduction(self, operation: Operation, op: AnyOp, tensors: Any) -> tuple[int, float]:
        """The engine's number of `op` and its factor; a list is checked as a whole."""
        if type(tensors) in LISTS:
            from unisono.comm.shared_memory.dtypes import dtypes_of

            dtypes = list(map(name_of_dtype, dtypes_of(tensors)))
        elif type(op) is str and op in REDUCTION_NUMBERS:
            return REDUCTION_NUMBERS[op], 1.0  # whether it means something the engine knows
        else:
            dtypes = [dtype_name(tensors)]
        from unisono.comm.arguments import check_reduction

        name, factor = self._checked(operation, check_reduction, op, dtypes, TRUNCATED_AVG)
        return REDUCTION_NUMBERS.get(name, _PREMUL_SUM), factor

    def _checked(self, operation: Operation, check: Callable[..., _T], *arguments: Any) -> _T:
        """What a check of `arguments` returns, or its refusal as this group's."""
        try:
            return check(*arguments)
        except OnDevice:
            raise
        except (ValueError, TypeError) as error:
            from unisono.comm.arguments import NotARank

            if isinstance(error, NotARank):
                self._refuse(operation, error.among(self.global_ranks))
            self._refuse(operation, str(error), type(error))

    def _check_root(self, operation: Operation, root: object) -> None:
        from unisono.comm.arguments import check_root

        self._checked(operation, check_root, root, self.size)

    def _check_wide_side(self, operation: Operation, root: object, wide: Any, side: str) -> None:
        from unisono.comm.arguments import check_wide_side

        self._checked(operation, check_wide_side, root, self.rank, self.size, wide, side)

    def _refuse(
        self, operation: Operation, why: str, kind: Callable[[str], Exception] = ValueError
    ) -> NoReturn:
        """Raise about our own arguments, once the peers know that this call will not happen."""
        if self._exceptions.cause is None:
            self._group.refuse(operation)
        raise kind(f"{operation.name.lower()} on group {self.name}: {why}") from None

    def _fail(
        self, status: int, operation: Operation, reduction: int = 0, tensors: Any = None
    ) -> NoReturn:
        tensor = tensors[0] if type(tensors) in LISTS and tensors else tensors
        raise self._exceptions.call_error(status, operation, reduction, dtype_name(tensor))
