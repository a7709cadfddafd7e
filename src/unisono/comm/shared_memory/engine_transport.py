"""A rank of a group of the engine, which runs every call as a whole: on one host, or on several."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from sys import is_finalizing
from typing import TYPE_CHECKING, Any

from unisono import variables
from unisono.comm.engine import (
    abandon_group,
    end_abandoned_groups,
    engine_ns,
    native,
    tell_closing,
    works,
)
from unisono.comm.engine.numbers import REDUCTION_NUMBERS, Note, Operation, Status
from unisono.comm.meeting.deadline import LATECOMERS_S, Deadline
from unisono.comm.meeting.makings import SHRINKS
from unisono.comm.meeting.membership import JoinRequest, Membership, meet_at
from unisono.comm.meeting.unix_socket import RendezvousServer
from unisono.comm.reductions import FORM_SHIFT, Reduction, known_reduction
from unisono.comm.shared_memory.exceptions import GroupExceptions
from unisono.comm.shared_memory.segment_listeners import announce_segment
from unisono.comm.tensors import dtype_name
from unisono.comm.transport import Transport
from unisono.comm.work import FinishedWork, Work, join_works
from unisono.errors import GroupError, GroupsDiffer, RendezvousError

if TYPE_CHECKING:
    from unisono.comm.arguments import Call
    from unisono.comm.engine.group_types import Gathered, Group

_LISTS = (list, tuple)
_NOTE_BYTES = 248  # csrc/unisono.h: UN_TEXT_BYTES
for _kind in works:
    Work.register(_kind)


class EngineTransport(Transport):
    """One member of it. `shown_name` is the group's for readers of its records, if it differs."""

    membership: Membership
    tags = range(-(2**63), 2**63)
    has_forms = True
    _refusals = 0

    def __init__(
        self,
        membership: Membership,
        server: RendezvousServer,
        name: str,
        global_ranks: tuple[int, ...] | None,
        timeout_s: float,
        shown_name: str = "",
    ) -> None:
        self.rank = membership.rank
        self.size = membership.size
        self.name = name
        self.global_ranks = global_ranks
        self.membership = membership
        self._server: RendezvousServer | None = server.share()
        self.group: Group = membership.group
        self.fast_path = membership.group
        self.exceptions: GroupExceptions = GroupExceptions(membership, name, global_ranks)
        self._refused_messages: list[Work] = []
        eager_bytes = variables.EAGER_SEND.read()
        threads = variables.COPY_THREADS.read()
        spin_us = variables.SPIN.read()
        self.group.configure(
            -1 if eager_bytes is None else eager_bytes,
            variables.READ_PEERS.read() is not False,
            -1 if threads is None else threads - 1,
            -1 if spin_us is None else 1000 * spin_us,
        )
        keeps_sites = variables.SITES.read() or False
        global_rank = self.rank if global_ranks is None else global_ranks[self.rank]
        self.group.introduce(shown_name or name, global_rank, keeps_sites)
        if (descriptor := self.group.state()["descriptor"]) >= 0:
            announce_segment(descriptor)
        self.timeout_s = timeout_s
        end_abandoned_groups()

    def __del__(self, is_finalizing: Callable[[], bool] = is_finalizing) -> None:
        if hasattr(self, "group") and not is_finalizing():  # else this module's names are gone
            abandon_group(self.group)

    @property
    def host_names(self) -> list[str]:
        """The name of each rank's host."""
        return [member.host or os.uname().nodename for member in self.membership.members]

    @property
    def timeout_s(self) -> float:
        return self.group.timeout_ns / 1e9

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self.group.timeout_ns = engine_ns(seconds)

    @property
    def reproducible(self) -> bool:
        """Whether reductions are reproducible, unless a call says otherwise."""
        return self.group.is_reproducible

    @reproducible.setter
    def reproducible(self, wanted: bool) -> None:
        self.group.is_reproducible = wanted

    # -- calls -------------------------------------------------------------------------------------

    def run(self, call: Call, async_op: bool) -> Work | None:
        return self._run_all(call, async_op, call.root, None)

    def _run_all(
        self,
        call: Call,
        async_op: bool,
        root: int,
        schedule: bytes | None,
        mark: int | None = None,
    ) -> Work | None:
        """One call of the engine or, for a coalesced call, one for each dtype."""
        if call.is_coalesced and not call.outputs:  # peers that have tensors must raise
            return self.barrier(None, async_op)
        op, group = call.reduction, self.group
        number, factor = (mark, 1.0)
        if op is not None:
            number, factor = op.number | call.form << FORM_SHIFT, op.factor
        more = (0, call.contributions, call.residual) if call.form else ()

        def run(output: Any, input: Any) -> Work | None:
            given = call.operation, output, input, root, number, factor, schedule, *more
            status = group.submit(self.exceptions, *given) if async_op else group.run(*given)
            if not isinstance(status, int):
                return status
            if status in (Status.ASK_AGAIN, Status.ON_DEVICE):
                if self.size == 1 and not call.contributions:
                    _move_alone(output, input, factor)
                    return FinishedWork() if async_op else None
                why = "the engine cannot read this memory"
                self.refuse(call.name, why)
                raise TypeError(f"{call.name} on group {self.name}: {why}")
            if status:
                raise self.call_error(status, call.operation, op, input)
            return None

        return join_works(run(*sides) for sides in _engine_calls(call))

    def barrier(self, timeout_s: float | None, async_op: bool) -> Work | None:
        if timeout_s is None and not async_op:
            status = self.group.barrier()
            if status:
                raise self.call_error(status, Operation.BARRIER, None, None)
            return None
        limit_ns = 0 if timeout_s is None else max(1, engine_ns(timeout_s))
        given = Operation.BARRIER, None, None, 0, None, 1.0, None, limit_ns
        work = self.group.submit(self.exceptions, *given)
        if isinstance(work, int):
            raise self.call_error(work, Operation.BARRIER, None, None)
        if async_op:
            return work
        work.wait()
        return None

    def call_error(self, status: int, operation: int, op: Any, tensors: Any) -> Exception:
        tensor = tensors[0] if type(tensors) in _LISTS and tensors else tensors
        name = op.name if isinstance(op, Reduction) else str(known_reduction(op))
        number = REDUCTION_NUMBERS.get(name, 0)
        return self.exceptions.call_error(status, operation, number, dtype_name(tensor))

    # -- messages ----------------------------------------------------------------------------------

    def send(self, tensor: Any, peer: int, tag: int) -> None:
        status = self.group.send(tensor, peer, tag)
        if status < 0:
            raise self.message_error(-status, True, peer, tag)

    def recv(self, tensor: Any, peer: int | None, tag: int) -> int:
        source = self.group.recv(tensor, peer, tag)
        if source < 0:
            raise self.message_error(-source, False, -1 if peer is None else peer, tag)
        return source

    def isend(self, tensor: Any, peer: int, tag: int) -> Work:
        return self.group.isend(self.exceptions, sys._getframe(1), tensor, peer, tag)

    def irecv(self, tensor: Any, peer: int | None, tag: int) -> Work:
        return self.group.irecv(self.exceptions, sys._getframe(1), tensor, peer, tag)

    def message_error(self, status: int, sends: bool, peer: int, tag: int) -> Exception:
        return self.exceptions.message_error(status, sends, peer, tag)

    # -- groups ------------------------------------------------------------------------------------

    def check_of_split(self, members: tuple[int, ...]) -> Callable[[], None]:
        """A check that raises if a member of a new group will not join. Followers on one host may
        wait long for a live leader."""
        late_s = time.monotonic() + LATECOMERS_S
        leads = self.rank == members[0] or not self.is_on_one_host

        def check() -> None:
            error = self.loss_among(members, f"split({list(members)})")
            is_late = leads and time.monotonic() > late_s
            if error is None and (self._server is None or is_late):
                error = self.ending("no call")
            if error is not None:
                raise error

        return check

    def meet(
        self,
        members: Sequence[int],
        name: str,
        check: Callable[[], None],
        segments: Sequence[tuple[Sequence[int], int, int]] = (),
    ) -> Membership:
        """Meet these ranks of this host to make a group, or one host's part of it."""
        server = self.server()
        request = JoinRequest(
            f"{self.membership.key}/{name.removeprefix(self.name)}",
            members.index(self.rank),
            len(members),
            Deadline(self.timeout_s),
            self.timeout_s,
            check=check,
            segments=segments,
        )
        leader = self.membership.members[members[0]]
        check()
        return meet_at(leader.address, server, request)

    @property
    def is_closed(self) -> bool:
        return self._server is None

    def server(self) -> RendezvousServer:
        """This process's, at which others meet it. Raises GroupClosed."""
        if self._server is None:
            raise self.exceptions.closed()
        return self._server

    def end_for_survivors(self) -> None:
        """End the group, so that no rank stays in a call of it. Raises GroupClosed if this
        process cannot continue."""
        self.server()
        if self.group.failure()[0] == Status.FORKED:
            raise self.exceptions.forked()
        self.abort(SHRINKS)

    def leave_out(self, members: tuple[int, ...]) -> None:
        self.exceptions.left_out_of = members

    # -- life --------------------------------------------------------------------------------------

    def refuse(self, operation: str, why: str) -> None:
        if self.exceptions.cause is None:
            self._note_refusal(why)
            self.group.refuse(Operation[operation.upper()])

    def refuse_message(self, sends: bool, peer: int | None, tag: int, why: str) -> None:
        """An empty message of a type that torch lacks: it fits only one that the peer refused."""
        import numpy

        if self.size == 1:
            return
        self._note_refusal(why)
        begin = self.group.isend if sends else self.group.irecv
        nothing = numpy.empty(0, numpy.longdouble)
        given = self.exceptions, sys._getframe(1), nothing, peer, tag
        self._refused_messages.append(begin(*given))

    def _note_refusal(self, why: str) -> None:
        self._refusals += 1  # a note about the same would not be written
        text = why.encode("utf-8", "replace")
        text = text if len(text) < _NOTE_BYTES else text[: _NOTE_BYTES - 4] + b"..."
        self.group.write_note(Note.REFUSAL, self._refusals, text.decode("utf-8", "ignore"))

    def abort(self, reason: str = "") -> None:
        self.group.abort(reason)

    def ending(self, doing: str) -> GroupError | None:
        if self._server is None:
            return self.exceptions.closed()
        status = self.group.failure()[0]
        if status == Status.FORKED:
            return self.exceptions.forked()
        return self.exceptions.failure(doing) if status else None

    def raise_if_ended(self) -> None:
        ending = self.ending("no call")
        if ending is not None:
            raise ending

    def loss_among(self, ranks: Sequence[int], doing: str) -> GroupError | None:
        return self.exceptions.loss_among(ranks, doing)

    def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            self.exceptions.closed_at = native.site_of(sys._getframe(1)) or ""
            try:
                absent = self.group.finish()
                if absent is not None:
                    self.group.abort(self.exceptions.close_without(absent))
                else:
                    tell_closing(self.group)
            finally:
                self.group.close()
                server.close()

    # -- tensors whose shapes only their owners know -----------------------------------------------

    def exchange_integers(
        self, integers: tuple[int, ...], limit_s: float = 0.0
    ) -> list[tuple[int, ...]]:
        everyone = self.group.exchange(integers, engine_ns(limit_s))
        if isinstance(everyone, int):
            raise self.exceptions.call_error(everyone, Operation.ALL_GATHER, 0, "uint8")
        return everyone

    def gather_ragged(
        self,
        tensor: Any,
        root: int | None,
        empty_like: Callable[[Any], Any],
        empty: Callable[[Any, int, tuple[int, ...]], Any],
    ) -> Gathered:
        """Every rank's tensor, in new tensors on `root`, or with None on every rank, if all are
        small; otherwise every rank's dtype and shape. `empty_like(tensor)` makes such a tensor,
        and `empty(tensor, dtype, shape)` any other on its device, of the dtype with this number."""
        gathered = self.group.gather_ragged(tensor, -1 if root is None else root, empty_like, empty)
        if isinstance(gathered, tuple):
            return gathered
        operation = Operation.ALL_GATHER if root is None else Operation.GATHER
        if gathered is None:
            from unisono.comm.arguments import check_tensor

            check_tensor(tensor, False, self.devices)
            raise TypeError("DLPack cannot export this tensor")
        raise self.exceptions.call_error(gathered, operation, 0, "uint8")


@contextlib.contextmanager
def told_of_deaths(check: Callable[[], None]) -> Iterator[None]:
    """If ranks do not meet because one of them has died, raise that, by `check`."""
    try:
        yield
    except RendezvousError as error:
        for _ in range(0 if isinstance(error, GroupsDiffer) else 50):
            check()  # a death is known in a moment
            time.sleep(0.01)
        raise


def _engine_calls(call: Call) -> list[tuple[Any, Any]]:
    """Output and input of each of the engine's calls for a call."""
    outputs, inputs = list(map(_given, call.outputs)), list(map(_given, call.inputs))
    if call.primitive.is_in_place and not call.contributions:
        inputs = outputs
    if call.contributions:
        return _by_dtype(call, outputs, inputs)
    if not call.is_coalesced:
        return [(outputs[0] if outputs else None, inputs[0] if inputs else None)]
    if any(isinstance(side, list) for side in [*outputs, *inputs]):
        return list(zip(outputs, inputs, strict=True))
    return _by_dtype(call, outputs, inputs)


def _by_dtype(call: Call, outputs: list[Any], inputs: list[Any]) -> list[tuple[Any, Any]]:
    alike: dict[str, list[int]] = {}
    for place, tensor in enumerate(outputs):
        alike.setdefault(dtype_name(tensor), []).append(place)
    calls: list[tuple[Any, Any]] = []
    for places in alike.values():
        to = [outputs[place] for place in places]
        source = to
        if inputs is not outputs:
            times = range(0, len(inputs), len(outputs)) if outputs else ()
            source = [inputs[start + place] for start in times for place in places]
        calls.append((to, source))
    return calls


def _move_alone(output: Any, input: Any, factor: float) -> None:
    """A call of one rank on what the engine cannot read: memory of a GPU, elements of less than a
    byte."""
    from unisono.comm.on_rows.rows import torch_row_of, write_back
    from unisono.comm.schedules.arithmetic import scale

    sides = (side if type(side) in _LISTS else [side] for side in (output, input))
    for to, source in zip(*sides, strict=True):
        if source is not to:
            write_back(to, torch_row_of(source))
        if factor != 1.0:
            scale(row := torch_row_of(to), factor)
            write_back(to, row)


def _given(side: Any) -> Any:
    """A side as the engine takes it: a tensor, or one for each rank."""
    if not hasattr(side, "is_list"):
        return side
    return side.tensors if side.is_list else side.tensors[0]
