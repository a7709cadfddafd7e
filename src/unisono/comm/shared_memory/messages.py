"""Messages of a group over the engine: the part of its Communicator that is point to point."""

from __future__ import annotations

from collections.abc import Callable
from sys import _getframe as _caller
from typing import TYPE_CHECKING

from unisono.comm.base import Work
from unisono.comm.engine import OnDevice
from unisono.comm.shared_memory.engine_calls import GpuTensors
from unisono.comm.shared_memory.exceptions import GroupExceptions

if TYPE_CHECKING:
    from unisono.comm.base import Tensor
    from unisono.comm.engine_types import Group


class EngineMessages(GpuTensors):
    """Sends and receives; and what they wait for, for those who look for deadlocks over hosts."""

    _group: Group
    _exceptions: GroupExceptions
    _send: Callable[..., int]
    _recv: Callable[..., int]
    _isend: Callable[..., Work]
    _irecv: Callable[..., Work]

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        if type(dst) is not int or not 0 <= dst < self.size:
            self._check_peer("send", dst)
        try:
            status = self._send(tensor, dst, tag)
        except OnDevice:
            self._gpu_group().send(tensor, dst, tag)
            return
        if status < 0:
            raise self._exceptions.message_error(-status, True, dst, tag)

    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> int:
        if src is None:
            src = -1
        elif type(src) is not int or not 0 <= src < self.size:
            self._check_peer("recv", src)
        try:
            source = self._recv(tensor, src, tag)
        except OnDevice:
            return self._gpu_group().recv(tensor, None if src < 0 else src, tag)
        if source < 0:
            raise self._exceptions.message_error(-source, False, src, tag)
        return source

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Work:
        if type(dst) is not int or not 0 <= dst < self.size:
            self._check_peer("send", dst)
        try:
            return self._isend(self._exceptions, _caller(1), tensor, dst, tag)
        except OnDevice:
            return self._gpu_group().isend(tensor, dst, tag)

    def irecv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> Work:
        if src is None:
            src = -1
        elif type(src) is not int or not 0 <= src < self.size:
            self._check_peer("recv", src)
        try:
            return self._irecv(self._exceptions, _caller(1), tensor, src, tag)
        except OnDevice:
            return self._gpu_group().irecv(tensor, None if src < 0 else src, tag)

    def _check_peer(self, what: str, peer: int) -> None:
        from unisono.comm.arguments import NotARank, check_peer

        try:
            check_peer(peer, self.size)
        except NotARank as error:
            why = error.among(self.global_ranks)
            raise ValueError(f"{what} on group {self.name}: {why}") from None

    def probe(self, tag: int) -> int:
        """Who sent the oldest message with this tag that no receive has asked for; -1: nobody."""
        return self._group.probe(tag)

    def waiting(self, rank: int) -> tuple[int, int, int, int, int, int] | None:
        """The message that a rank waits for, in the engine's words: whether it sends, whether it
        was started before, peer, tag, and what of that peer is here with other tags."""
        return self._group.waiting(rank)

    def stuck(self, rank: int) -> tuple[int, int] | None:
        """A number for the wait of a rank that can go on only with the help of one peer which has
        nothing on its way to it, and that peer; else None."""
        return self._group.stuck(rank)
