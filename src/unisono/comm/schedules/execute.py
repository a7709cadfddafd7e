"""Run a schedule on any Communicator, over messages; and a collective by an algorithm."""

from __future__ import annotations

import hashlib
import re
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from unisono.cases.primitives import primitive_of
from unisono.comm.arguments import Call, WideSide, check_call, check_root, flatten
from unisono.comm.engine.numbers import Operation
from unisono.comm.forms import refused_by
from unisono.comm.on_rows.mismatches import Mismatch, find_minority
from unisono.comm.on_rows.rows import Row, concatenate, is_torch
from unisono.comm.reductions import AnyReduction, Reduction
from unisono.comm.schedules.arithmetic import combine, empty_like, placed_like
from unisono.comm.schedules.compiled_schedules import (
    CompiledSchedule,
    Move,
    Round,
    compile_schedule,
    schedule_for,
)
from unisono.comm.schedules.workspace import Workspace
from unisono.comm.tensors import Tensors, dtype_name
from unisono.comm.work import Message, Work
from unisono.errors import ScheduleError, UnisonoError
from unisono.plan.schedule import Schedule

if TYPE_CHECKING:
    from unisono.comm.communicator import Communicator
    from unisono.comm.forms import GivenCall
    from unisono.comm.transport import Transport

COMPILED = (Operation.ALL_REDUCE, Operation.BROADCAST)
"""The collectives for which a transport can run compiled schedules; the others use messages."""

FIRST_TAG = 1 << 30
"""Tags from here to 3 * 2**29 - 1 are for executions: use others for a program's own messages."""

SLICE_BYTES = 1 << 20
_MOST_SLICES = 64
_TEXT_BYTES = 248
_PARTS_OF_BYTES = re.compile("u?int[1-7]")

_executions: weakref.WeakKeyDictionary[Communicator, int] = weakref.WeakKeyDictionary()


def _refuse_form(why: str, given: tuple[Any, ...], named: dict[str, Any]) -> NoReturn:
    for each in (*given, *named.values()):
        if hasattr(each, "_refuse_for"):
            each._refuse_for("all_reduce", TypeError(why))
    raise TypeError(why)


@refused_by(_refuse_form, "unisono")
def run_schedule(
    schedule: Schedule,
    comm: Communicator,
    output: Tensors | None = None,
    input: Tensors | None = None,
    op: AnyReduction = "sum",
) -> None:
    """Run `schedule` on `comm`, by messages between its ranks.

    Arguments and results are those of the Communicator's method for the schedule's collective,
    `output` first, then `input`, and `op`; the root is the schedule's own (docs/execution.md has a
    table). Every rank calls it with an equal schedule. Sums follow the schedule's order.

    Raises ValueError or TypeError for invalid arguments (a schedule for another number of ranks),
    ScheduleError for a schedule that `verify` rejects, CollectiveMismatch if the ranks' schedules,
    sizes, types or reductions differ: before any data moves, and the group remains usable.
    Cost: what the schedule sends: `unisono.plan.costs` counts it. See also `all_reduce`.

    >>> from unisono import plan
    >>> x = torch.full((4,), float(comm.rank))
    >>> unisono.run_schedule(plan.find("all_reduce", "ring").schedule(comm.size), comm, x, op="max")
    >>> x
    tensor([1., 1., 1., 1.])
    """
    try:
        if schedule.ranks != comm.size:
            raise ValueError(f"{schedule.title()} does not fit group {comm.name} of {comm.size}")
        compiled = compile_schedule(schedule, comm.rank)
        jobs, reduction = _check(schedule, comm, output, input, op)
    except (ValueError, TypeError, ScheduleError) as error:
        comm._refuse_for(schedule.collective, error)
    if not jobs:
        comm.barrier()  # nothing to move, but peers that have data must detect the difference
    for outputs, inputs in jobs:
        workspace = Workspace(schedule, comm.rank, compiled.receives, outputs, inputs, reduction)
        tag = _agree(comm, compiled, workspace)
        try:
            workspace.begin()
            if comm.size > 1:
                _Execution(comm, compiled, workspace, tag).run()
            workspace.end()
        except UnisonoError:
            raise
        except Exception as error:  # the others must not wait for this rank
            comm.abort(f"{schedule.title()} failed on rank {comm.rank}: {error!r}")
            raise


def run_by(comm: Communicator, transport: Transport, given: GivenCall) -> Work | None:
    """What `comm.broadcast(tensor, algorithm=algorithm)` and the other collectives do."""
    operation, output, input, root, op, async_op, algorithm = given
    assert algorithm is not None
    name = operation.name.lower()
    is_in_place = primitive_of(name).is_in_place
    try:
        root = check_root(root, comm.size)
        if operation == Operation.ALL_REDUCE and transport is not comm.transport:
            raise ValueError("algorithm= is for CPU tensors: leave it out for CUDA tensors")
        schedule = schedule_for(name, algorithm, comm.size, root)
        if transport.run_schedule is not None and operation in COMPILED:
            call = check_call(operation, output, input, root, op, transport)
            return transport.run_schedule(call, algorithm, schedule, async_op)
        if async_op:
            raise ValueError(f"{schedule.algorithm} over messages does not support async_op")
    except (ValueError, TypeError, ScheduleError) as error:
        comm._refuse_for(name, error)
    run_schedule(schedule, comm, output, None if is_in_place else input, op)
    return None


# -- before data moves -----------------------------------------------------------------------------

_Job = tuple[list[Any], list[Any]]
"""The tensors of both sides that move together."""


def _check(
    schedule: Schedule, comm: Communicator, output: Any, input: Any, op: Any
) -> tuple[list[_Job], Reduction | None]:
    """The jobs to execute one after the other, and the reduction."""
    if schedule.primitive.is_empty:
        return [([] if output is None else [output], [])], None
    if schedule.primitive.is_in_place and input is not None:
        raise ValueError(f"{schedule.collective} works in place and takes no input")
    # Messages carry tensors of any device, and refuse those that a group cannot send.
    everywhere: Any = SimpleNamespace(
        rank=comm.rank, size=comm.size, devices=("cpu", "cuda"), check_call=lambda call: None
    )
    operation = Operation[schedule.collective.upper()]
    call = check_call(operation, output, input, schedule.root, op, everywhere)
    for tensor in call.tensors:
        if _PARTS_OF_BYTES.fullmatch(dtype_name(tensor)):
            raise TypeError(
                f"torch cannot copy elements of {dtype_name(tensor)}: pass .view(torch.uint8)"
            )
    for side in (*call.outputs, *call.inputs):
        if isinstance(side, WideSide) and len(set(side.counts)) > 1:
            raise ValueError(
                f"the parts have {list(side.counts)} elements, but an algorithm cuts a wide side "
                "evenly: leave out algorithm= for parts of different sizes"
            )
    jobs = _jobs(call)
    if any(len({is_torch(tensor) for tensor in to + source}) > 1 for to, source in jobs):
        raise TypeError("a call by an algorithm takes torch tensors or NumPy arrays, not both")
    return jobs, call.reduction


def _jobs(call: Call) -> list[_Job]:
    if call.primitive.is_in_place:
        alike: dict[tuple[str, bool], list[Any]] = {}
        for tensor in call.outputs:
            alike.setdefault((dtype_name(tensor), is_torch(tensor)), []).append(tensor)
        return [(tensors, []) for tensors in alike.values()]
    if not call.is_coalesced:
        return [(flatten(call.outputs), flatten(call.inputs))]
    pairs = zip(call.outputs, call.inputs, strict=True)
    return [(flatten([to]), flatten([source])) for to, source in pairs]


def _agree(comm: Communicator, compiled: CompiledSchedule, workspace: Workspace) -> int:
    """Compare the calls of all ranks; returns the tag of this execution's messages."""
    serial = _executions.get(comm, 0)
    _executions[comm] = serial + 1
    text = f"{compiled.title}, {workspace.text}"
    described = hashlib.blake2b(
        f"{compiled.fingerprint} {serial} {workspace.text}".encode(), digest_size=8
    ).digest()
    if comm.size > 1:
        line = described + text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES)
        _compare(comm, line, workspace.whole)
    return FIRST_TAG + (serial % (1 << 13) << 16) + int.from_bytes(described[:2], "little")


def _compare(comm: Communicator, line: bytes, like: Row) -> None:
    mine = placed_like(np.frombuffer(line, np.uint8).copy(), like)
    all_lines = empty_like(mine, comm.size * len(line))
    comm.all_gather(all_lines, mine)
    raw = (all_lines.cpu().numpy() if is_torch(all_lines) else all_lines).tobytes()
    lines = [raw[start : start + len(line)] for start in range(0, len(raw), len(line))]
    if len(set(lines)) == 1:
        return
    calls = [line[8:].decode(errors="replace").strip() + f" [{line[:8].hex()}]" for line in lines]
    found = Mismatch(calls, [None] * comm.size, find_minority(calls))
    text = found.text(f"the ranks of group {comm.name} execute different schedules", "execute")
    raise found.error(text, comm.rank, comm.name)


# -- moving ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Arrival:
    """A message to us, how much of it has been taken, and whether it is already in place."""

    row: Row
    elements: int
    in_place: bool
    taken: int = 0


class _Execution:
    """One execution on one rank. Slices are in different steps at once (compiled_schedules.py)."""

    def __init__(
        self, comm: Communicator, compiled: CompiledSchedule, workspace: Workspace, tag: int
    ) -> None:
        self._comm = comm
        self._rounds = compiled.rounds
        self._workspace = workspace
        self._whole = workspace.whole
        self._tag = tag
        self._slices = workspace.slices(SLICE_BYTES, _MOST_SLICES)

    def run(self) -> None:
        rounds, slices = len(self._rounds), self._slices
        for time in range(slices + rounds - 1):
            first, last = max(0, time - rounds + 1), min(time, slices - 1)
            self._step([(part, self._rounds[time - part]) for part in range(first, last + 1)])

    def _step(self, active: list[tuple[int, Round]]) -> None:
        """One step: all messages together, then take what has arrived."""
        outgoing = [
            (peer, self._spans(moves, part))
            for part, round in active
            for peer, moves in _by_peer(round.sends)
        ]
        sent = [span for _, spans in outgoing for span in spans]
        arrivals = {
            (part, peer): self._expect(moves, self._spans(moves, part), sent)
            for part, round in active
            for peer, moves in _by_peer(round.receives)
        }
        messages = [
            Message("recv", arrival.row, peer, self._tag)
            for (_, peer), arrival in arrivals.items()
            if arrival.elements
        ]
        for peer, spans in outgoing:
            if _length(spans):
                row = concatenate([self._whole[begin:end] for begin, end in spans])
                messages.append(Message("send", row, peer, self._tag))
        for work in self._comm.batch_isend_irecv(messages) if messages else ():
            work.wait()
        for part, round in active:
            for move in round.receives:
                self._take(move, part, arrivals[part, move.peer])

    def _spans(self, moves: Sequence[Move], part: int) -> list[tuple[int, int]]:
        return [
            span
            for move in moves
            for span in self._workspace.spans(move.chunk, move.count, part, self._slices)
        ]

    def _expect(
        self, moves: Sequence[Move], spans: list[tuple[int, int]], sent: list[tuple[int, int]]
    ) -> _Arrival:
        """A message may arrive in place if its target is contiguous, is overwritten, and is not
        being sent meanwhile; otherwise it arrives in a buffer."""
        if len(moves) == 1 and len(spans) == 1 and not moves[0].reduces:
            begin, end = spans[0]
            if not any(begin < last and first < end for first, last in sent):
                return _Arrival(self._whole[begin:end], end - begin, True)
        elements = _length(spans)
        return _Arrival(empty_like(self._whole, elements), elements, False)

    def _take(self, move: Move, part: int, arrival: _Arrival) -> None:
        if arrival.in_place:
            return
        for begin, end in self._spans([move], part):
            piece = arrival.row[arrival.taken : arrival.taken + end - begin]
            arrival.taken += end - begin
            if move.reduces:
                combine(self._whole[begin:end], piece, self._workspace.op)
            else:
                self._whole[begin:end] = piece


def _by_peer(moves: Sequence[Move]) -> list[tuple[int, list[Move]]]:
    """All moves to or from one peer are one message."""
    peers: dict[int, list[Move]] = {}
    for move in moves:
        peers.setdefault(move.peer, []).append(move)
    return list(peers.items())


def _length(spans: list[tuple[int, int]]) -> int:
    return sum(end - begin for begin, end in spans)
