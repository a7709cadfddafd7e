"""Point to point on a process group of torch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from unisono.comm.arguments import NotARank, check_peer, check_tensor
from unisono.comm.base import Message, Tensor, Work, check_messages
from unisono.comm.over_torch.group import TorchGroup
from unisono.comm.over_torch.transport import ON_STREAMS
from unisono.comm.row_collectives import device_of
from unisono.comm.row_group import LAST_TAG
from unisono.comm.rows import bytes_of, row_of, write_back
from unisono.errors import CollectiveTimeout


class TorchMessages(TorchGroup):
    """A member that can send and receive messages."""

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        self._wait(self.isend(tensor, dst, tag))

    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> int:
        work = self.irecv(tensor, src, tag)
        self._wait(work)
        return work.source_rank()

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Work:
        row = self._message(tensor, dst, tag, False)
        return self._begin_message(
            lambda: self._transport.group.send([bytes_of(row)], dst, tag),
            lambda work: None,
            tensor,
            f"send to rank {dst} (tag {tag})",
        )

    def irecv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> Work:
        row = self._message(tensor, src, tag, True)
        data = [bytes_of(row)]

        def begin() -> Any:
            if src is None:
                return self._transport.group.recv_anysource(data, tag)
            return self._transport.group.recv(data, src, tag)

        def end(work: Any) -> int:
            write_back(tensor, row)
            return int(work._source_rank()) if src is None else src

        who = "any" if src is None else src
        return self._begin_message(begin, end, tensor, f"recv from rank {who} (tag {tag})")

    def batch_isend_irecv(self, messages: Sequence[Message]) -> list[Work]:
        messages = check_messages(messages)
        devices = {device_of([message.tensor]) for message in messages}
        if not any(self._transport.backend(device) in ON_STREAMS for device in devices):
            return super().batch_isend_irecv(messages)
        (device,) = devices  # nccl carries them out together, in any order, if it is told to
        group = self._transport.group
        group._start_coalescing(device)
        works = super().batch_isend_irecv(messages)
        whole = group._end_coalescing(device)
        for work in works:
            assert isinstance(work, StreamMessage)
            work.belongs_to(whole)
        return works

    def _message(self, tensor: Any, peer: int | None, tag: int, writable: bool) -> torch.Tensor:
        self._faults.check()
        try:
            if peer is not None:
                check_peer(peer, self.size)
            if peer == self.rank:
                raise ValueError(f"{self.backend} has no messages from a rank to itself")
            if type(tag) is not int or not 0 <= tag <= LAST_TAG:
                raise ValueError(f"tag {tag!r} does not lie in 0 to {LAST_TAG}")
            check_tensor(tensor, writable, tuple(self._transport.backends))
        except (ValueError, TypeError) as error:
            doing, kind, why = "recv" if writable else "send", type(error), str(error)
            if isinstance(error, NotARank):
                kind, why = ValueError, error.among(self.global_ranks)
            raise kind(f"{doing} on group {self.name}: {why}") from None
        return row_of(tensor)

    def _begin_message(
        self, begin: Callable[[], Any], end: Callable[[Any], int | None], tensor: Any, doing: str
    ) -> Work:
        if self._transport.backend(device_of([tensor])) in ON_STREAMS:
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


class StreamMessage(Work):
    """A message that a device carries."""

    def __init__(self, work: Any, end: Callable[[Any], int | None], doing: str) -> None:
        self._work = work
        self._end = end
        self._doing = doing
        self._source: int | None = None
        self._is_over = False

    def belongs_to(self, whole: Any) -> None:
        """It was begun together with others, whose end is its own."""
        self._work = whole

    def wait(self, timeout_s: float | None = None) -> None:
        if self._is_over:
            return
        if timeout_s is None:
            self._work.wait()
        elif not self._work.wait(timedelta(seconds=timeout_s)):
            raise CollectiveTimeout(f"{self._doing} is still under way")
        self._source = self._end(self._work)
        self._is_over = True

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def exception(self) -> Exception | None:
        return None

    def source_rank(self) -> int:
        self.wait()
        return super().source_rank() if self._source is None else self._source
