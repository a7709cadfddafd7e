"""A collective of a Communicator by an algorithm of the caller's choice, over messages.

A schedule knows one tensor on each side. What a Communicator takes beside that is made one here:
tensors of a list that travel together, and the parts of a wide side that lie in a list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unisono.comm import flat
from unisono.comm.arguments import LISTS, check_coalesced, check_reduction, check_tensor
from unisono.comm.base import AnyOp, Communicator, Tensors, Work, count, dtype_name
from unisono.comm.compiled_schedules import schedule_for
from unisono.comm.execute import execute, refuse
from unisono.comm.overlaps import overlap_complaint
from unisono.errors import ScheduleError
from unisono.plan.schedule import Schedule

_DEVICES = ("cpu", "cuda")
_IN_PLACE = ("all_reduce", "broadcast", "reduce")
_NARROW_OUTPUT = "reduce_scatter"


def run_by(
    algorithm: str | Schedule,
    comm: Communicator,
    collective: str,
    output: Tensors,
    input: Tensors | None = None,
    root: int = 0,
    op: AnyOp = "sum",
    async_op: bool = False,
) -> Work | None:
    """What `comm.broadcast(tensor, algorithm=algorithm)` does, and its siblings.

    Afterwards each rank has what the Communicator's method promises. Raises ValueError on every
    rank, and the group goes on, for an algorithm that there is not, with `async_op`, and for parts
    of a wide side that differ in size; else as `execute`.
    """
    try:
        if not isinstance(root, int) or not 0 <= root < comm.size:
            raise ValueError(f"root {root!r} is not a rank of a group of {comm.size}")
        schedule = schedule_for(collective, algorithm, comm.size, root)
        if async_op:
            raise ValueError(f"{schedule.algorithm} over messages has no async_op here")
        calls = _calls(comm, collective, output, input, op)
    except (ValueError, TypeError, ScheduleError) as error:
        refuse(comm, collective, error)
    if not calls:
        comm.barrier()  # nothing to move, but peers that have something must learn of it
    for to, source in calls:
        row_to, row_from = _joined(to), None if source is None else _joined(source)
        execute(schedule, comm, row_to, row_from, op)
        if isinstance(to, LISTS) and (collective != "reduce" or comm.rank == root):
            _deal_out(row_to, to)
    return None


def _calls(
    comm: Communicator, collective: str, output: Any, input: Any, op: AnyOp
) -> list[tuple[Any, Any]]:
    """What is executed one after the other: a tensor or a list of tensors for each side."""
    if collective in _IN_PLACE:
        if not isinstance(output, LISTS):
            return [(output, None)]
        _check_all(output, True)
        if collective != "broadcast":
            check_reduction(op, map(dtype_name, output))
        _check_overlaps(overlap_complaint(collective, output))
        return [(alike, None) for alike in _by_dtype(output)]
    narrow = output if collective == _NARROW_OUTPUT else input
    is_coalesced = isinstance(narrow, LISTS) and collective != "all_to_all"
    if is_coalesced:
        check_coalesced(output, input)
    pairs = list(zip(output, input, strict=True)) if is_coalesced else [(output, input)]
    for to, source in pairs:
        outputs, inputs = _listed(to), _listed(source)
        _check_all(outputs, True)
        _check_all(inputs, False)
        for side, tensors in ((to, outputs), (source, inputs)):
            if isinstance(side, LISTS):
                _check_equal_parts(tensors, comm.size)
        if to is not source:
            _check_overlaps(overlap_complaint(collective, outputs, inputs, comm.rank, comm.size))
    if is_coalesced and not any(isinstance(side, LISTS) for pair in pairs for side in pair):
        _check_overlaps(
            overlap_complaint(collective, output, input, comm.rank, comm.size, coalesced=True)
        )
    return pairs


def _listed(side: Any) -> list[Any]:
    return list(side) if isinstance(side, LISTS) else [side]


def _check_all(tensors: Sequence[Any], writable: bool) -> None:
    for tensor in tensors:
        check_tensor(tensor, writable, _DEVICES)


def _check_overlaps(complaint: str) -> None:
    if complaint:
        raise ValueError(complaint)


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
