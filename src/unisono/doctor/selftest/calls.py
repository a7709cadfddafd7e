"""What the self-test calls of each primitive, and what must come out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy

from unisono.comm.base import Communicator, Message
from unisono.plan.expectations import Array, compute, origins

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class PreparedCall:
    """One call, ready to run: what to call, where the result will lie, and what it must be."""

    call: Callable[[], object]
    result: Sequence[torch.Tensor]
    expected: Sequence[torch.Tensor]


def _brought(rank: int, part: int, elements: int) -> Array:
    """Rank `rank`'s part for rank `part`: whole numbers, so that every order of adding is exact."""
    index = numpy.arange(elements)
    return ((index * 3 + 17 * rank + 5 * part) % 97).astype(numpy.float32)


def prepared_calls(
    comm: Communicator, elements: int, device: torch.device
) -> Iterator[tuple[str, Callable[[], PreparedCall]]]:
    """Every primitive's name and how to prepare one call of it.

    What must come out is computed here from all ranks' inputs, without any communication.
    """
    import torch

    rank, size = comm.rank, comm.size
    root = size - 1
    brought = functools.partial(_brought, elements=elements)
    own = torch.from_numpy(brought(rank, 0)).to(device)
    wide = torch.from_numpy(numpy.concatenate([brought(rank, to) for to in range(size)])).to(device)

    def blank(parts: int = 1) -> torch.Tensor:
        return torch.full((parts * elements,), -1.0, device=device)

    @functools.cache
    def expected(collective: str, op: str, receiver: int) -> torch.Tensor | None:
        parts = origins(collective, receiver, size, root)
        if parts is None:
            return None
        return torch.from_numpy(numpy.concatenate([compute(part, brought, op) for part in parts]))

    def checked(
        collective: str,
        call: Callable[[torch.Tensor], object],
        parts: int | None = None,
        op: str = "sum",
    ) -> Callable[[], PreparedCall]:
        """A call that works in place, or into a tensor of `parts` parts."""

        def prepare() -> PreparedCall:
            tensor = own.clone() if parts is None else blank(parts)
            right = expected(collective, op, rank)
            if right is None:
                right = tensor.cpu().clone()
            return PreparedCall(lambda: call(tensor), [tensor], [right])

        return prepare

    def all_reduce_async(tensor: torch.Tensor) -> None:
        work = comm.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()

    def reduce_scatter_and_gather() -> PreparedCall:
        part, whole = blank(), blank(size)
        shares = [expected("reduce_scatter", "sum", receiver) for receiver in range(size)]

        def call() -> None:
            comm.reduce_scatter(part, wide)
            comm.all_gather(whole, part)

        right = torch.cat([share for share in shares if share is not None])
        return PreparedCall(call, [whole], [right])

    is_root = rank == root
    yield "barrier", lambda: PreparedCall(lambda: comm.barrier(), [], [])
    yield "broadcast", checked("broadcast", lambda t: comm.broadcast(t, root))
    yield "reduce", checked("reduce", lambda t: comm.reduce(t, root))
    yield "all_reduce sum", checked("all_reduce", lambda t: comm.all_reduce(t))
    yield "all_reduce mean", checked("all_reduce", lambda t: comm.all_reduce(t, "mean"), op="avg")
    yield "all_reduce max", checked("all_reduce", lambda t: comm.all_reduce(t, "max"), op="max")
    yield "all_reduce async", checked("all_reduce", all_reduce_async)
    yield (
        "gather",
        checked("gather", lambda t: comm.gather(t if is_root else None, own, root), size),
    )
    yield (
        "scatter",
        checked("scatter", lambda t: comm.scatter(t, wide if is_root else None, root), 1),
    )
    yield "all_gather", checked("all_gather", lambda t: comm.all_gather(t, own), size)
    yield "reduce_scatter", checked("reduce_scatter", lambda t: comm.reduce_scatter(t, wide), 1)
    yield "reduce_scatter, gather", reduce_scatter_and_gather
    yield "all_to_all", checked("all_to_all", lambda t: comm.all_to_all(t, wide), size)
    if size > 1:  # alone there is nobody to send to
        for name, ring in _rings(comm, own):
            yield name, checked("ring", ring, 1)


def _rings(
    comm: Communicator, own: torch.Tensor
) -> Iterator[tuple[str, Callable[[torch.Tensor], None]]]:
    """Point to point, each rank to the next one of a ring."""
    following, previous = comm.next, comm.prev

    def blocking(tensor: torch.Tensor) -> None:
        if (
            comm.rank == 0
        ):  # one begins by sending, the others by receiving: nobody waits in a circle
            comm.send(own, following)
            comm.recv(tensor, previous)
        else:
            comm.recv(tensor, previous)
            comm.send(own, following)

    def begun(tensor: torch.Tensor) -> None:
        works = [comm.irecv(tensor, previous), comm.isend(own, following)]
        for work in works:
            work.wait()

    def batched(tensor: torch.Tensor) -> None:
        messages = [Message("send", own, following), Message("recv", tensor, previous)]
        for work in comm.batch_isend_irecv(messages):
            work.wait()

    yield "send, recv", blocking
    yield "isend, irecv", begun
    yield "batch_isend_irecv", batched
