"""Messages between two ranks as plain functions; `src` and `dst` are ranks of the group."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.collectives.arguments import ResultWork
from unisono.collectives.types import Group, Tensor, TensorT
from unisono.comm.work import Message, Work
from unisono.world.world import resolve


def send(tensor: Tensor, dst: int, group: Group = None, *, tag: int = 0) -> None:
    """Send `tensor` to rank `dst` of `group` with a `tag`; returns once a receiver has matched it,
    at every size. Raises what `Communicator.send` raises.

    >>> if comm.rank == 0:
    ...     unisono.send(torch.ones(2), dst=1)
    ... else:
    ...     x = unisono.recv(torch.empty(2), src=0)
    """
    resolve(group).send(tensor, dst, tag)


def recv(tensor: TensorT, src: int | None = None, group: Group = None, *, tag: int = 0) -> TensorT:
    """Receive the first message with this `tag` from rank `src` of `group`, or from any rank, into
    `tensor`, and return it. Raises what `Communicator.recv` raises.

    >>> work = unisono.isend(torch.ones(2), comm.next)
    >>> unisono.recv(torch.empty(2))
    tensor([1., 1.])
    >>> work.wait()
    """
    resolve(group).recv(tensor, src, tag)
    return tensor


def isend(tensor: Tensor, dst: int, group: Group = None, *, tag: int = 0) -> Work:
    """Like `send` of `tensor` to `dst` in `group` with a `tag`, but returns at once. Raises what
    `Communicator.isend` raises.

    >>> work = unisono.isend(torch.ones(2), comm.next)
    >>> unisono.recv(torch.empty(2), comm.prev)
    tensor([1., 1.])
    >>> work.wait()
    """
    return resolve(group).isend(tensor, dst, tag)


def irecv(
    tensor: TensorT, src: int | None = None, group: Group = None, *, tag: int = 0
) -> Work[TensorT]:
    """Like `recv` into `tensor` from `src` in `group` with a `tag`, but returns at once: the work's
    `wait()` returns the tensor. Raises what `Communicator.irecv` raises.

    >>> work = unisono.irecv(torch.empty(2))
    >>> unisono.send(torch.ones(2), comm.next)
    >>> work.wait()
    tensor([1., 1.])
    """
    return ResultWork(resolve(group).irecv(tensor, src, tag), tensor)


def batch_isend_irecv(messages: Sequence[Message], group: Group = None) -> list[Work]:
    """Start several `messages` in `group` together; returns a work for each. Their order does not
    matter: they cannot block each other. Raises what `Communicator.batch_isend_irecv` raises.

    >>> x = torch.empty(1)
    >>> receive = unisono.Message("recv", x, peer=comm.prev)
    >>> send = unisono.Message("send", torch.ones(1), peer=comm.next)
    >>> for work in unisono.batch_isend_irecv([receive, send]):
    ...     work.wait()
    >>> x
    tensor([1.])
    """
    return resolve(group).batch_isend_irecv(messages)
