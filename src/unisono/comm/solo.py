"""Solo: the transport of a group of one. It needs no engine and no other process."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NoReturn

from unisono.comm.arguments import Call, flatten
from unisono.comm.schedules import flat
from unisono.comm.transport import DEFAULT_TIMEOUT_S, Transport
from unisono.comm.work import FinishedWork, Work
from unisono.errors import GroupAborted, GroupClosed, GroupError, NoQuorum

if TYPE_CHECKING:
    from unisono.plan.schedule import Schedule


class Solo(Transport):
    """A group of one, by the same rules as all others, on GPUs, too."""

    devices = ("cpu", "cuda")
    rank = 0
    size = 1

    def __init__(
        self,
        name: str = "world",
        global_ranks: tuple[int, ...] | None = (0,),
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self.name = name
        self.global_ranks = global_ranks
        self.timeout_s = timeout_s
        self._ending: GroupError | None = None
        self._decisions: dict[int, int] = {}

    def run(self, call: Call, async_op: bool) -> Work | None:
        for to, source in zip(flatten(call.outputs), flatten(call.inputs), strict=False):
            _assign(to, source)
        if call.reduction is not None and call.reduction.factor != 1.0:
            for tensor in call.outputs:
                row = flat.flat(tensor)
                flat.scale(row, call.reduction.factor)
                flat.write_back(tensor, row)
        return FinishedWork() if async_op else None

    def run_schedule(self, call: Call, schedule: Schedule, async_op: bool) -> Work | None:
        from unisono.comm.schedules.compiled_schedules import compile_schedule

        compile_schedule(schedule, 0)
        return self.run(call, async_op)

    def barrier(self, timeout_s: float | None, async_op: bool) -> Work | None:
        return FinishedWork() if async_op else None

    def check_message(self, sends: bool, peer: int | None) -> None:
        raise ValueError("a group of one has no other rank to exchange messages with")

    def send(self, tensor: Any, peer: int, tag: int) -> NoReturn:
        raise AssertionError  # no message passes the check

    recv = isend = irecv = send  # type: ignore[assignment]

    def split(self, members: tuple[int, ...], name: str) -> Transport:
        if self._ending is not None:
            raise copy.copy(self._ending)
        return Solo(name, self.global_ranks, self.timeout_s)

    def shrink(self, name: str, at_least: int, timeout_s: float, store: Any) -> Transport:
        if at_least > 1:
            text = f"group {self.name} cannot continue: it has one rank, at_least={at_least}"
            raise NoQuorum(text, rank=0, group=self.name)
        if isinstance(self._ending, GroupClosed):
            raise copy.copy(self._ending)
        return Solo(name, self.global_ranks, self.timeout_s)

    def raise_if_ended(self) -> None:
        if self._ending is not None:
            raise copy.copy(self._ending)

    def exchange_integers(self, integers: tuple[int, ...], _: float = 0) -> list[tuple[int, ...]]:
        return [integers]

    def refuse(self, operation: str, why: str) -> None:
        """There are no peers to tell."""

    def abort(self, reason: str = "") -> None:
        if self._ending is None:
            text = f"rank 0 ended group {self.name}" + (f": {reason}" if reason else "")
            self._ending = GroupAborted(text, rank=0, group=self.name, peer=0, reason=reason)

    def decide(self, serial: int, value: int) -> int:
        return self._decisions.setdefault(serial, value)

    def ending(self, doing: str) -> GroupError | None:
        return None if self._ending is None else copy.copy(self._ending)

    def close(self) -> None:
        self._ending = GroupClosed(f"group {self.name} is closed", rank=0, group=self.name)


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
