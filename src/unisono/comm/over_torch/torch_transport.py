"""Over torch: any torch.distributed process group (gloo, nccl, mpi) as a transport. Reductions
are the backend's own: those that it lacks are refused, and sums of floats follow its order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from unisono import variables
from unisono.comm.arguments import Call, flatten
from unisono.comm.meeting.board import answer_within
from unisono.comm.on_rows.announced_calls import (
    AnnouncedCall,
    decode_call,
    encode_call,
    find_mismatch,
)
from unisono.comm.on_rows.row_transport import Rows, RowTransport, device_of
from unisono.comm.on_rows.rows import bytes_of, torch_row_of, write_back
from unisono.comm.on_rows.thread_executor import INTERRUPTED, ThreadExecutor
from unisono.comm.over_torch.faults import Faults
from unisono.comm.over_torch.held_group import (
    ON_STREAMS,
    HeldGroup,
    check_supported,
    reduce_op,
    wait_for,
)
from unisono.comm.over_torch.process_groups import destroy, new_group
from unisono.comm.over_torch.stream_executor import (
    StreamExecutor,
    StreamMessage,
    in_order_of_streams,
)
from unisono.comm.reductions import Reduction
from unisono.comm.tensors import dtype_name
from unisono.comm.transport import Transport
from unisono.comm.work import Work
from unisono.errors import GroupAborted, GroupClosed, GroupError, RendezvousError, UnisonoError

Remake = Callable[["OverTorch", Sequence[int], str], "OverTorch"]


class OverTorch(RowTransport):
    """`keep` keeps the process group alive; without it the group lives as long as torch knows
    it. With `owns` it is destroyed on `close`. `remake` makes a group of some of its members:
    torch's new_group, unless the group is outside torch's world."""

    def __init__(
        self,
        group: Any,
        *,
        keep: bool = True,
        owns: bool = False,
        remake: Remake | None = None,
    ) -> None:
        self._held = HeldGroup(group, keep or owns)
        self._owns = owns
        self._remake = remake or new_in_world
        self._is_in_world = remake is None
        self.rank = group.rank()
        self.size = group.size()
        self.name = "world" if group is dist.group.WORLD else str(group.group_name)
        self.global_ranks = None
        with contextlib.suppress(KeyError, ValueError, RuntimeError):  # torch may not know it
            self.global_ranks = tuple(dist.get_process_group_ranks(group))
        self.timeout_s = self._held.timeout_s
        kinds = self._held.backends
        # nccl for "cpu:gloo,cuda:nccl"
        self.backend = next(
            (kinds[device] for device in kinds if device != "cpu"), kinds.get("cpu", "")
        )
        self._checks = "cpu" in kinds and variables.CHECK.read() is not False
        store = None
        with contextlib.suppress(RuntimeError):
            store = group.get_group_store()
        self.devices = tuple(kinds)
        self._faults = Faults(self.name, self.rank, store)
        self._thread = ThreadExecutor(self.name)
        self._streams = StreamExecutor()

    @property
    def process_group(self) -> Any:
        """The torch process group, for `torch.distributed`'s own functions."""
        return self._held.group

    def split(self, members: tuple[int, ...], name: str) -> Transport:
        self._faults.check()
        return self._remake(self, members, name)

    def abort(self, reason: str = "") -> None:
        if self._faults.ending() is not None:
            return
        text = f"rank {self.rank} ended group {self.name}" + (f": {reason}" if reason else "")
        ours = {"rank": self.rank, "peer": self.rank}
        self._faults.end(GroupAborted(text, group=self.name, reason=reason, **ours))
        self._hang_up()

    def decide(self, serial: int, value: int) -> int:
        return self._faults.decide(serial, value, self.timeout_s)

    def _hang_up(self) -> None:
        """Make every running call fail, here and on the other ranks."""
        if self.size == 1:
            return
        group = self._held.group
        if self._held.backends.get("cpu") != "gloo":
            group.abort()
            return
        with contextlib.suppress(RuntimeError):
            # gloo's abort does nothing, but a receive that times out closes all connections
            nothing = torch.empty(1, dtype=torch.uint8)
            work = group.recv([nothing], (self.rank + 1) % self.size, self.tags.stop)
            work.wait(timedelta(milliseconds=1))
        if self.backend == "nccl" and not self._is_in_world:
            group._get_backend(torch.device("cuda")).abort()

    def ending(self, doing: str) -> GroupError | None:
        return self._faults.ending()

    @property
    def is_closed(self) -> bool:
        """Whether it was closed; in a forked child, as it was in the parent."""
        return isinstance(self._faults.cause, GroupClosed)

    def close(self) -> None:
        """Release everything. A group that this object has made ends, and a call in it that the
        others have not joined within 1 s fails; another group stays, once its calls are over."""
        if self.is_closed:
            return
        if not self._owns:
            self._thread.finish()
            self._faults.closed(tell=False)
            self._thread.close()
            return
        is_busy = not self._thread.settle()
        self._faults.closed(tell=is_busy)
        if is_busy:
            self._hang_up()
        self._thread.close()
        if not self._is_in_world:
            self._held.release()
        else:
            destroy(self._held.group)

    # -- how a call runs -------------------------------------------------------------------------

    def announce(
        self,
        text: str,
        sends: Sequence[int] = (),
        takes: Sequence[int] = (),
        timeout_s: float | None = None,
    ) -> AnnouncedCall:
        self._faults.check()
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        return AnnouncedCall(text, sends, takes, timeout_s=limit_s)

    def carry_out(
        self, call: AnnouncedCall, job: Callable[[], None], tensors: list[Any], async_op: bool
    ) -> Work | None:
        device = device_of(tensors) if tensors or "cpu" in self._held.backends else _this_gpu()
        doing = call.operation
        if self._held.backend(device) in ON_STREAMS:
            with self._translated(doing):
                if async_op:
                    return self._streams.begin(job, doing, device, tensors)
                with torch.inference_mode():
                    job()
            return None

        def checked() -> None:
            self._faults.check()
            with self._translated(doing):
                self._compare(call)
                job()

        work = self._thread.begin(in_order_of_streams(checked, device), doing)
        if async_op:
            return work
        self._wait(work)
        return None

    def _wait(self, work: Work) -> None:
        """Wait in Python, so that Ctrl-C works; a running call is then abandoned."""
        try:
            work.wait()
        except BaseException:
            if not work.is_completed():
                self.abort(INTERRUPTED)
            raise

    def _compare(self, call: AnnouncedCall) -> None:
        """Compare with the other ranks' calls."""
        if not self._checks:
            return
        mine = encode_call(call, self.size)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        self._held.run("allgather", call.timeout_s, c10d.AllgatherOptions(), [rows], [mine])
        error = find_mismatch([decode_call(row, self.size) for row in rows], self.rank, self.name)
        if error is not None:
            raise self._faults.end(error, tell=False)  # all ranks detect it

    @contextlib.contextmanager
    def _translated(self, doing: str) -> Any:
        """Raise errors of the backend as ours. They end the group."""
        try:
            yield
        except (GroupError, ValueError, TypeError):
            raise
        except RuntimeError as error:
            cause = self._faults.translate(error, doing)
            raise cause from cause.__cause__

    def refuse(self, operation: str, why: str) -> None:
        """The peers learn of it when they compare calls."""
        if self._checks and self._faults.cause is None:
            text = f"{operation} with arguments that it refused: {why}"
            call = AnnouncedCall(text, refused=True, timeout_s=self.timeout_s)
            self.carry_out(call, lambda: None, [], True)

    def check_call(self, call: Call) -> None:
        if call.reduction is None:
            return
        for tensor in flatten(call.outputs):
            backend = self._held.backend(torch.device(getattr(tensor, "device", "cpu")))
            check_supported(call.reduction, dtype_name(tensor), backend)

    # -- rows ------------------------------------------------------------------------------------

    def reduce_row(
        self, row: torch.Tensor, op: Reduction, root: int | None, call: AnnouncedCall, keep: bool
    ) -> torch.Tensor:
        wire = row.clone() if keep else row
        numbers = torch.view_as_real(wire) if wire.is_complex() else wire
        backend = self._held.backend(row.device)
        how: dict[str, Any] = {"reduceOp": reduce_op(op, backend)}
        if root is None:
            self._held.run("allreduce", call.timeout_s, c10d.AllreduceOptions(), [numbers], **how)
        else:
            how["rootRank"] = root
            self._held.run("reduce", call.timeout_s, c10d.ReduceOptions(), [numbers], **how)
        if op.name == "avg" and backend != "nccl":
            numbers.div_(self.size)
        return wire

    def scatter_rows(self, by_rank: Rows, op: Reduction, call: AnnouncedCall) -> torch.Tensor:
        """Our part of the reduction. gloo's own reduce_scatter is an all_reduce as well."""
        lengths = [part.numel() for part in by_rank]
        backend = self._held.backend(by_rank[0].device)
        if backend in ON_STREAMS and len(set(lengths)) == 1 and not by_rank[0].is_complex():
            result = torch.empty_like(by_rank[0])
            given, how = ([result], [by_rank]), reduce_op(op, backend)
            options = c10d.ReduceScatterOptions()
            self._held.run("reduce_scatter", call.timeout_s, options, *given, reduceOp=how)
            return result
        whole = self.reduce_row(torch.cat(by_rank), op, None, call, False)
        begin = sum(lengths[: self.rank])
        return whole[begin : begin + lengths[self.rank]]

    def broadcast_row(self, row: torch.Tensor, root: int, call: AnnouncedCall) -> None:
        wait_for([self._begin_broadcast(row, root, call)])

    def _begin_broadcast(self, row: torch.Tensor, root: int, call: AnnouncedCall) -> Any:
        options = c10d.BroadcastOptions()
        how = {"rootRank": root, "rootTensor": 0}
        return self._held.begin("broadcast", call.timeout_s, options, [row], **how)

    def gather_rows(self, targets: Rows, row: torch.Tensor, call: AnnouncedCall) -> None:
        if len({target.numel() for target in targets}) == 1:
            self._held.run("allgather", call.timeout_s, c10d.AllgatherOptions(), [targets], [row])
            return
        targets[self.rank].copy_(row)
        wait_for([self._begin_broadcast(row, root, call) for root, row in enumerate(targets)])

    def exchange_rows(
        self, output: torch.Tensor, input: torch.Tensor, width: int, call: AnnouncedCall
    ) -> None:
        is_new = hasattr(self._held.group, "all_to_all_single")
        name = "all_to_all_single" if is_new else "alltoall_base"
        sizes = ([count * width for count in counts] for counts in (call.takes, call.sends))
        self._held.run(name, call.timeout_s, c10d.AllToAllOptions(), output, input, *sizes)

    def meet(self, call: AnnouncedCall) -> None:
        if self._checks:  # all ranks have already met
            return
        options: Any = c10d.BarrierOptions()
        if "cpu" not in self._held.backends:
            options.device = _this_gpu()
            options.device_ids = [torch.cuda.current_device()]
        self._held.run("barrier", call.timeout_s, options)

    # -- messages --------------------------------------------------------------------------------

    def check_message(self, sends: bool, peer: int | None) -> None:
        if peer == self.rank:
            raise ValueError(f"{self.backend} does not support messages from a rank to itself")

    def send(self, tensor: Any, peer: int, tag: int) -> None:
        self._wait(self.isend(tensor, peer, tag))

    def recv(self, tensor: Any, peer: int | None, tag: int) -> int:
        work = self.irecv(tensor, peer, tag)
        self._wait(work)
        return work.source_rank()

    def isend(self, tensor: Any, peer: int, tag: int) -> Work:
        row = torch_row_of(tensor)
        return self._begin_message(
            lambda: self._held.group.send([bytes_of(row)], peer, tag),
            lambda work: None,
            tensor,
            f"send to rank {peer} (tag {tag})",
        )

    def irecv(self, tensor: Any, peer: int | None, tag: int) -> Work:
        row = torch_row_of(tensor)
        data = [bytes_of(row)]

        def begin() -> Any:
            if peer is None:
                return self._held.group.recv_anysource(data, tag)
            return self._held.group.recv(data, peer, tag)

        def end(work: Any) -> int:
            write_back(tensor, row)
            return int(work._source_rank()) if peer is None else peer

        who = "any" if peer is None else peer
        return self._begin_message(begin, end, tensor, f"recv from rank {who} (tag {tag})")

    def batch(self, tensors: Sequence[Any], begin: Callable[[], list[Work]]) -> list[Work]:
        devices = {device_of([tensor]) for tensor in tensors}
        if not any(self._held.backend(device) in ON_STREAMS for device in devices):
            return begin()
        (device,) = devices  # nccl runs them together, in any order, if asked to
        group = self._held.group
        group._start_coalescing(device)
        works = begin()
        whole = group._end_coalescing(device)
        for work in works:
            assert isinstance(work, StreamMessage)
            work.belongs_to(whole)
        return works

    def _begin_message(
        self, begin: Callable[[], Any], end: Callable[[Any], int | None], tensor: Any, doing: str
    ) -> Work:
        if self._held.backend(device_of([tensor])) in ON_STREAMS:
            with self._translated(doing):
                return StreamMessage(begin(), end, doing)
        limit = timedelta(seconds=self.timeout_s)
        with self._translated(doing):
            work = begin()

        def job() -> int | None:
            with self._translated(doing):
                work.wait(limit)
                return end(work)

        return self._thread.run_beside(job, doing)


def new_in_world(parent: OverTorch, members: Sequence[int], name: str) -> OverTorch:
    """The group of these ranks, all of which call it."""
    if getattr(dist.group.WORLD, "bound_device_id", None) is not None:
        raise UnisonoError(
            "the members of a group alone cannot split it if its world is bound to a device "
            "(init_process_group(device_id=...)): call dist.new_group on all ranks"
        )
    group = parent.process_group
    global_of = dist.get_process_group_ranks(group)
    ranks, limit_s = [global_of[rank] for rank in members], parent.timeout_s
    try:
        made = answer_within(limit_s + 1.0, lambda: new_group(group, ranks, name, limit_s))
    except UnisonoError:
        raise
    except RuntimeError as error:  # gloo connects the ranks at once: one may have ended
        raise RendezvousError(f"group {name} could not be made: {error}") from error
    transport = OverTorch(made, owns=True)
    if dist.get_backend(made) == dist.Backend.GLOO:
        transport.barrier(None, False)  # closing earlier would break connections
    return transport


def _this_gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
