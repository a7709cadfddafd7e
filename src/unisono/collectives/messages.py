"""Messages between two ranks as plain functions; `src` and `dst` are ranks of the group."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.collectives.arguments import ResultWork
from unisono.collectives.types import Group, Tensor, TensorT
from unisono.comm.work import Message, Work
from unisono.world.world import resolve, well_formed


@well_formed
def send(tensor: Tensor, dst: int, group: Group = None, *, tag: int = 0) -> None:
    """Send `tensor` to rank `dst` of `group` with a `tag`; return once a receiver has matched it.

    Raises MessageMismatch if the receiver wants another dtype or size, DeadlockError if ranks wait
    for each other in a circle, ValueError if `dst` is not a rank of the group.
    Cost: the tensor's bytes once. See also `recv`, `isend`, `batch_isend_irecv`.

    >>> if comm.rank == 0:
    ...     unisono.send(torch.ones(2), dst=1)
    ... else:
    ...     assert unisono.recv(torch.empty(2), src=0).tolist() == [1.0, 1.0]
    """
    resolve(group).send(tensor, dst, tag)


@well_formed
def recv(tensor: TensorT, src: int | None = None, group: Group = None, *, tag: int = 0) -> TensorT:
    """Receive into `tensor` from rank `src` of `group`, or from anybody, the first message with
    that `tag`, and return it.

    Raises MessageMismatch if the message has another dtype or size, DeadlockError if ranks wait for
    each other in a circle, ValueError if `src` is not a rank of the group.
    Cost: the tensor's bytes once. See also `send`, `irecv`, `batch_isend_irecv`.

    >>> work = unisono.isend(torch.ones(2), comm.next)
    >>> unisono.recv(torch.empty(2))
    tensor([1., 1.])
    >>> work.wait()
    """
    resolve(group).recv(tensor, src, tag)
    return tensor


@well_formed
def isend(tensor: Tensor, dst: int, group: Group = None, *, tag: int = 0) -> Work:
    """Begin to send `tensor` to rank `dst` of `group` with a `tag`, and return a Work at once. Its
    `wait()` raises what went wrong on the way; do not change `tensor` before it returns. Raises
    ValueError if `dst` is not a rank of the group.
    Cost: the tensor's bytes once. See also `send`, `irecv`, `Work`.

    >>> work = unisono.isend(torch.ones(2), comm.next)
    >>> unisono.recv(torch.empty(2), comm.prev)
    tensor([1., 1.])
    >>> work.wait()
    """
    return resolve(group).isend(tensor, dst, tag)


@well_formed
def irecv(
    tensor: TensorT, src: int | None = None, group: Group = None, *, tag: int = 0
) -> Work[TensorT]:
    """Begin to receive into `tensor`, from rank `src` of `group` or from anybody, the first message
    with that `tag`, and return a Work at once. Its `wait()` returns the tensor, or raises what went
    wrong on the way. Raises ValueError if `src` is not a rank of the group.
    Cost: the tensor's bytes once. See also `recv`, `isend`, `Message`.

    >>> work = unisono.irecv(torch.empty(2))
    >>> unisono.send(torch.ones(2), comm.next)
    >>> work.wait()
    tensor([1., 1.])
    """
    return ResultWork(resolve(group).irecv(tensor, src, tag), tensor)


@well_formed
def batch_isend_irecv(messages: Sequence[Message], group: Group = None) -> list[Work]:
    """Start many `messages` in `group` together, with a work for each; no order among them can make
    them block each other. Raises ValueError if a message's peer is not a rank of the group.
    Cost: the bytes of its messages once. See also `isend`, `irecv`, `all_to_all`.

    >>> x = torch.empty(1)
    >>> receive = unisono.Message("recv", x, peer=comm.prev)
    >>> send = unisono.Message("send", torch.ones(1), peer=comm.next)
    >>> for work in unisono.batch_isend_irecv([receive, send]):
    ...     work.wait()
    >>> x
    tensor([1.])
    """
    return resolve(group).batch_isend_irecv(messages)
