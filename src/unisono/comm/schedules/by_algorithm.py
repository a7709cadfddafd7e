"""A collective of a Communicator by an algorithm of the caller's choice, over messages.

A schedule knows one tensor on each side. What a Communicator takes beside that is made one here:
tensors of a list that travel together, and the parts of a wide side that lie in a list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from unisono.comm.arguments import (
    LISTS,
    check_call,
    check_coalesced,
    check_overlaps,
    check_reduction,
    check_root,
    check_tensors,
)
from unisono.comm.engine.numbers import Operation
from unisono.comm.schedules import flat
from unisono.comm.schedules.compiled_schedules import schedule_for
from unisono.comm.schedules.execute import execute
from unisono.comm.tensors import count, dtype_name
from unisono.comm.work import Work
from unisono.errors import ScheduleError
from unisono.plan.schedule import Schedule

if TYPE_CHECKING:
    from unisono.comm.communicator import Communicator
    from unisono.comm.transport import Transport

_DEVICES = ("cpu", "cuda")
_IN_PLACE = (Operation.ALL_REDUCE, Operation.BROADCAST, Operation.REDUCE)


def run_by(
    algorithm: str | Schedule,
    comm: Communicator,
    transport: Transport,
    operation: Operation,
    output: Any,
    input: Any,
    root: Any,
    op: Any,
    async_op: bool,
) -> Work | None:
    """What `comm.broadcast(tensor, algorithm=algorithm)` does, and its siblings.

    Afterwards each rank has what the Communicator's method promises. Raises ValueError on every
    rank, and the group goes on, for an algorithm that there is not, with `async_op` but for an
    all_reduce of the engine's, and for parts of a wide side that differ in size; else as `execute`.
    """
    name = operation.name.lower()
    in_engine = transport.run_schedule is not None and operation == Operation.ALL_REDUCE
    try:
        root = check_root(root, comm.size)
        if operation == Operation.ALL_REDUCE and transport is not comm.transport:
            raise ValueError("an algorithm is for CPU tensors: pass none with CUDA tensors")
        schedule = schedule_for(name, algorithm, comm.size, root)
        if in_engine:
            call = check_call(operation, output, input, root, op, transport)
            assert transport.run_schedule is not None
            return transport.run_schedule(call, schedule, async_op)
        if async_op:
            raise ValueError(f"{schedule.algorithm} over messages has no async_op here")
        calls = _calls(transport, operation, output, input, op)
    except (ValueError, TypeError, ScheduleError) as error:
        comm.refuse_for(name, error)
    if not calls:
        comm.barrier()  # nothing to move, but peers that have something must learn of it
    for to, source in calls:
        row_to, row_from = _joined(to), None if source is None else _joined(source)
        execute(schedule, comm, row_to, row_from, op)
        if isinstance(to, LISTS) and (operation != Operation.REDUCE or comm.rank == root):
            _deal_out(row_to, to)
    return None


def _calls(
    transport: Transport, operation: Operation, output: Any, input: Any, op: Any
) -> list[tuple[Any, Any]]:
    """What is executed one after the other: a tensor or a list of tensors for each side."""
    if operation in _IN_PLACE:
        if not isinstance(output, LISTS):
            return [(output, None)]
        check_tensors(output, True, _DEVICES)
        if operation != Operation.BROADCAST:
            check_reduction(op, map(dtype_name, output))
        check_overlaps(operation, output, [], transport.rank, transport.size)
        return [(alike, None) for alike in _by_dtype(output)]
    narrow = output if operation == Operation.REDUCE_SCATTER else input
    is_coalesced = isinstance(narrow, LISTS) and operation != Operation.ALL_TO_ALL
    if is_coalesced:
        check_coalesced(output, input)
    pairs = list(zip(output, input, strict=True)) if is_coalesced else [(output, input)]
    for to, source in pairs:
        outputs = check_tensors(to, True, _DEVICES)
        inputs = check_tensors(source, False, _DEVICES)
        for side, tensors in ((to, outputs), (source, inputs)):
            if isinstance(side, LISTS):
                _check_equal_parts(tensors, transport.size)
        if to is not source:
            check_overlaps(operation, outputs, inputs, transport.rank, transport.size)
    if is_coalesced and not any(isinstance(side, LISTS) for pair in pairs for side in pair):
        check_overlaps(operation, output, input, transport.rank, transport.size, True)
    return pairs


def _check_equal_parts(tensors: Sequence[Any], size: int) -> None:
    if len(tensors) != size:
        raise ValueError(f"a list of {len(tensors)} tensors in a group of {size} ranks")
    if len({(dtype_name(tensor), flat.is_torch(tensor)) for tensor in tensors}) > 1:
        raise TypeError("the tensors of one call have different dtypes")
    counts = [count(tensor) for tensor in tensors]
    if len(set(counts)) > 1:
        raise ValueError(
            f"parts of {counts} elements: an algorithm cuts a wide side evenly; leave out "
            "algorithm= for parts of different sizes"
        )


def _by_dtype(tensors: Sequence[Any]) -> list[list[Any]]:
    alike: dict[tuple[str, bool], list[Any]] = {}
    for tensor in tensors:
        alike.setdefault((dtype_name(tensor), flat.is_torch(tensor)), []).append(tensor)
    return list(alike.values())


def _joined(side: Any) -> Any:
    """One tensor in place of a list."""
    if not isinstance(side, LISTS):
        return side
    return flat.concatenate([flat.flat(tensor) for tensor in side])


def _deal_out(row: Any, tensors: Sequence[Any]) -> None:
    begin = 0
    for tensor in tensors:
        flat.write_back(tensor, row[begin : begin + count(tensor)])
        begin += count(tensor)
