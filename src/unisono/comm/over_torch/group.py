"""What every call over torch goes through: its arguments, its executor, its end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from unisono import variables
from unisono.comm.announced_calls import (
    AnnouncedCall,
    decode_call,
    encode_call,
    find_mismatch,
)
from unisono.comm.base import Work
from unisono.comm.executors import INTERRUPTED, ThreadExecutor
from unisono.comm.over_torch.executors import StreamExecutor, in_order_of_streams
from unisono.comm.over_torch.faults import Faults
from unisono.comm.over_torch.transport import ON_STREAMS, Transport
from unisono.comm.row_collectives import RowCollectives, device_of
from unisono.comm.row_group import LAST_TAG
from unisono.errors import GroupAborted, GroupClosed, GroupError


class TorchGroup(RowCollectives):
    """One member of a process group of torch's, without its collectives.

    `keep` holds on to the process group; without it the group lives as long as torch knows it.
    `owns` destroys it on `close`.
    """

    def __init__(self, group: Any, *, keep: bool = True, owns: bool = False) -> None:
        self._transport = Transport(group, keep or owns)
        self._owns = owns
        self.rank = self._transport.rank
        self.size = self._transport.size
        self.name = "world" if group is dist.group.WORLD else str(group.group_name)
        self.global_ranks = None
        with contextlib.suppress(KeyError, ValueError, RuntimeError):  # torch may not know it
            self.global_ranks = tuple(dist.get_process_group_ranks(group))
        self.timeout_s = self._transport.timeout_s
        kinds = self._transport.backends
        # of "cpu:gloo,cuda:nccl" it is nccl
        self.backend = next(
            (kinds[device] for device in kinds if device != "cpu"), kinds.get("cpu", "")
        )
        self._checks = "cpu" in kinds and variables.CHECK.read() is not False
        store = None
        with contextlib.suppress(RuntimeError):
            store = group.get_group_store()
        self._faults = Faults(self.name, self.rank, store)
        self._thread = ThreadExecutor(self.name)
        self._streams = StreamExecutor()

    @property
    def process_group(self) -> Any:
        """The torch process group, for `torch.distributed`'s own functions."""
        return self._transport.group

    @property
    def _devices(self) -> Collection[str]:
        return tuple(self._transport.backends)

    def _raise_if_ended(self) -> None:
        self._faults.check()

    def abort(self, reason: str = "") -> None:
        if self._faults.cause is not None:
            return
        text = f"rank {self.rank} ended group {self.name}" + (f": {reason}" if reason else "")
        ours = {"rank": self.rank, "peer": self.rank}
        self._faults.end(GroupAborted(text, group=self.name, reason=reason, **ours))
        self._hang_up()

    def _decide(self, serial: int, value: int) -> int:
        return self._faults.decide(serial, value, self.timeout_s)

    def _hang_up(self) -> None:
        """Have every call that is under way fail, here and on the other ranks."""
        if self.size == 1:
            return
        group = self._transport.group
        if self._transport.backends.get("cpu") != "gloo":
            group.abort()
            return
        with contextlib.suppress(RuntimeError):
            # gloo's abort does nothing, but a receive that times out closes all connections
            nothing = torch.empty(1, dtype=torch.uint8)
            work = group.recv([nothing], (self.rank + 1) % self.size, LAST_TAG + 1)
            work.wait(timedelta(milliseconds=1))

    @property
    def errored(self) -> GroupError | None:
        return self._faults.cause

    def close(self) -> None:
        """Give everything back. A group that this object has made ends, and a call in it for which
        the others have not come within 1 s fails; another goes on, once what was begun is over."""
        if isinstance(self._faults.cause, GroupClosed):
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
        if self._transport.group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(self._transport.group)

    # -- how a call is carried out ---------------------------------------------------------------

    def _call(
        self,
        text: str,
        sends: Sequence[int] = (),
        takes: Sequence[int] = (),
        timeout_s: float | None = None,
    ) -> AnnouncedCall:
        self._faults.check()
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        return AnnouncedCall(text, sends, takes, timeout_s=limit_s)

    def _run(
        self, call: AnnouncedCall, job: Callable[[], None], tensors: list[Any], async_op: bool
    ) -> Work | None:
        device = device_of(tensors) if tensors or "cpu" in self._transport.backends else _this_gpu()
        doing = call.operation
        if self._transport.backend(device) in ON_STREAMS:
            with self._translated(doing):
                if async_op:
                    return self._streams.begin(job, doing, device, tensors)
                with torch.inference_mode():
                    job()
            return None

        def checked() -> None:
            self._faults.check()
            with self._translated(doing):
                self._meet(call)
                job()

        work = self._thread.begin(in_order_of_streams(checked, device), doing)
        if async_op:
            return work
        self._wait(work)
        return None

    def _wait(self, work: Work) -> None:
        """Wait in Python, so that Ctrl-C is heard; what is under way then is given up."""
        try:
            work.wait()
        except BaseException:
            if not work.is_completed():
                self.abort(INTERRUPTED)
            raise

    def _meet(self, call: AnnouncedCall) -> None:
        """Compare with what the others are about to do."""
        if not self._checks:
            return
        mine = encode_call(call, self.size)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        self._transport.all_gather(rows, mine, call.timeout_s)
        error = find_mismatch([decode_call(row, self.size) for row in rows], self.rank, self.name)
        if error is not None:
            raise self._faults.end(error, tell=False)  # all see it

    @contextlib.contextmanager
    def _translated(self, doing: str) -> Any:
        """Let errors of the backend out as ours. They end the group."""
        try:
            yield
        except (GroupError, ValueError, TypeError):
            raise
        except RuntimeError as error:
            cause = self._faults.translate(error, doing)
            raise cause from cause.__cause__

    # -- arguments -------------------------------------------------------------------------------

    def _refuse(self, what: str, why: str, kind: type[Exception] = ValueError) -> NoReturn:
        """Raise about our own arguments; the peers learn of it in their meeting."""
        if self._checks and self._faults.cause is None:
            call = AnnouncedCall(what, refused=True, timeout_s=self.timeout_s)

            def tell() -> None:
                with self._translated(what):
                    self._meet(call)

            self._thread.begin(tell, what)
        raise kind(f"{what} on group {self.name}: {why}") from None


def _this_gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
