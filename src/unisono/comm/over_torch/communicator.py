"""The implementation over torch: any torch.distributed process group (gloo, nccl, mpi).

By the rules of all implementations: group ranks, tensors of any layout, lists of different sizes.
Reductions are the backend's own: those that it lacks are refused, and sums of floats are taken in
its order, not in the order of ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from unisono.comm.announced_calls import AnnouncedCall
from unisono.comm.base import AnyOp, Communicator, Op, dtype_name
from unisono.comm.over_torch.messages import TorchMessages
from unisono.comm.over_torch.process_groups import new_group
from unisono.comm.over_torch.reductions import averages, check_supported
from unisono.comm.over_torch.transport import ON_STREAMS
from unisono.comm.rendezvous.bounded_store import answer_within
from unisono.comm.row_group import Rows
from unisono.errors import GroupClosed, RendezvousError, UnisonoError


class TorchCommunicator(TorchMessages):
    """A process group of torch's as a Communicator."""

    def split(self, ranks: Sequence[int], label: str = "") -> Communicator | None:
        members = self._members(ranks)
        if self.rank not in members:
            return None
        self._faults.check()
        return self._make_group(members, self._name_split(members, label))

    def _make_group(self, members: Sequence[int], name: str) -> Communicator:
        """The group of these ranks, all of which call."""
        if getattr(dist.group.WORLD, "bound_device_id", None) is not None:
            raise UnisonoError(
                "a group whose world is bound to a device (init_process_group(device_id=...)) "
                "cannot be split by its members alone: call dist.new_group on all ranks"
            )
        parent = self._transport.group
        global_of = dist.get_process_group_ranks(parent)
        try:
            ranks, limit_s = [global_of[rank] for rank in members], self.timeout_s
            group = answer_within(limit_s + 1.0, lambda: new_group(parent, ranks, name, limit_s))
        except UnisonoError:
            raise
        except RuntimeError as error:  # gloo connects the ranks at once: one may have ended
            raise RendezvousError(f"group {name} could not be made: {error}") from error
        made = TorchCommunicator(group, owns=True)
        if dist.get_backend(group) == dist.Backend.GLOO:
            made.barrier()  # who closes it at once would break off those that still connect
        return made

    def _check_op(self, what: str, op: AnyOp, tensors: list[Any]) -> Op:
        known = super()._check_op(what, op, tensors)
        for tensor in tensors:
            backend = self._transport.backend(torch.device(getattr(tensor, "device", "cpu")))
            self._checked(what, check_supported, known, dtype_name(tensor), backend)
        return known

    def _reduced(
        self, row: torch.Tensor, op: Op, root: int | None, call: AnnouncedCall, keep: bool
    ) -> torch.Tensor:
        wire = row.clone() if keep else row
        numbers = torch.view_as_real(wire) if wire.is_complex() else wire
        if root is None:
            self._transport.all_reduce(numbers, op, call.timeout_s)
        else:
            self._transport.reduce(numbers, root, op, call.timeout_s)
        if op == "avg" and not averages(self._transport.backend(row.device)):
            numbers.div_(self.size)
        return wire

    def _scattered(self, by_rank: Rows, op: Op, call: AnnouncedCall) -> torch.Tensor:
        """Our part of the reduction. gloo's own reduce_scatter is an all_reduce as well."""
        lengths = [part.numel() for part in by_rank]
        on_stream = self._transport.backend(by_rank[0].device) in ON_STREAMS
        if on_stream and len(set(lengths)) == 1 and not by_rank[0].is_complex():
            result = torch.empty_like(by_rank[0])
            self._transport.reduce_scatter(result, by_rank, op, call.timeout_s)
            return result
        whole = self._reduced(torch.cat(by_rank), op, None, call, False)
        begin = sum(lengths[: self.rank])
        return whole[begin : begin + lengths[self.rank]]

    def _broadcast_row(self, row: torch.Tensor, root: int, call: AnnouncedCall) -> None:
        self._transport.broadcast([row], [root], call.timeout_s)

    def _all_gather_rows(self, targets: Rows, row: torch.Tensor, call: AnnouncedCall) -> None:
        if len({target.numel() for target in targets}) == 1:
            self._transport.all_gather(targets, row, call.timeout_s)
        else:
            targets[self.rank].copy_(row)
            self._transport.broadcast(targets, range(self.size), call.timeout_s)

    def _exchange_rows(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        from_each: Sequence[int],
        to_each: Sequence[int],
        width: int,
        call: AnnouncedCall,
    ) -> None:
        self._transport.exchange(output, input, from_each, to_each, call.timeout_s)

    def _barrier_rows(self, call: AnnouncedCall) -> None:
        if not self._checks:  # where calls are checked all ranks have met already
            self._transport.barrier(call.timeout_s)


_wrapped: weakref.WeakKeyDictionary[Any, TorchCommunicator] = weakref.WeakKeyDictionary()


def wrap(group: Any) -> TorchCommunicator:
    """The Communicator of another library's process group: always the same, until somebody closes
    it or the group goes."""
    comm = _wrapped.get(group)
    if comm is None or isinstance(comm.errored, GroupClosed):
        comm = _wrapped[group] = TorchCommunicator(group, keep=False)
    return comm
