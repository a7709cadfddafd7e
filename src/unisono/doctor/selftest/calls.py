"""What the self-test calls on each primitive, and what must come out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unisono.comm.base import Communicator, Message

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class PreparedCall:
    """One call, ready to be made: what to call, where the result will lie, and what it must be."""

    call: Callable[[], object]
    result: Sequence[torch.Tensor]
    expected: Sequence[torch.Tensor]


def _values(rank: int, part: int, elements: int) -> torch.Tensor:
    """Rank `rank`'s part for rank `part`: whole numbers, so that every order of adding is exact."""
    import torch

    return (torch.arange(elements) * 3 + 17 * rank + 5 * part).remainder(97).float()


def prepared_calls(
    comm: Communicator, elements: int, device: torch.device
) -> Iterator[tuple[str, Callable[[], PreparedCall]]]:
    """Every primitive's name and how to make one call of it ready.

    What must come out is computed here from all ranks' inputs, without any communication.
    """
    import torch

    rank, size = comm.rank, comm.size
    ranks, root = range(size), size - 1
    inputs = [[_values(source, part, elements) for part in ranks] for source in ranks]
    narrow = [inputs[source][0] for source in ranks]
    total = torch.stack(narrow).sum(0)

    own, wide = narrow[rank].to(device), torch.cat(inputs[rank]).to(device)

    def blank(parts: int = 1) -> torch.Tensor:
        return torch.full((parts * elements,), -1.0, device=device)

    def in_place(call: Callable[[torch.Tensor], object], expected: torch.Tensor) -> PreparedCall:
        tensor = own.clone()
        return PreparedCall(lambda: call(tensor), [tensor], [expected])

    def into(
        call: Callable[[torch.Tensor], object], parts: int, expected: torch.Tensor
    ) -> PreparedCall:
        output = blank(parts)
        return PreparedCall(lambda: call(output), [output], [expected])

    def waited(tensor: torch.Tensor) -> None:
        work = comm.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()

    def whole(tensor: torch.Tensor) -> None:
        part = blank()
        comm.reduce_scatter(part, wide)
        comm.all_gather(tensor, part)

    yield "barrier", lambda: PreparedCall(lambda: comm.barrier(), [], [])
    yield "broadcast", lambda: in_place(lambda t: comm.broadcast(t, root), narrow[root])
    reduced = total if rank == root else narrow[rank]
    yield "reduce", lambda: in_place(lambda t: comm.reduce(t, root), reduced)
    yield "all_reduce sum", lambda: in_place(lambda t: comm.all_reduce(t), total)
    yield "all_reduce mean", lambda: in_place(lambda t: comm.all_reduce(t, "mean"), total / size)
    largest = torch.stack(narrow).amax(0)
    yield "all_reduce max", lambda: in_place(lambda t: comm.all_reduce(t, "max"), largest)
    yield "all_reduce async", lambda: in_place(waited, total)
    everything = torch.cat(narrow)
    is_root = rank == root
    yield (
        "gather",
        lambda: into(
            lambda t: comm.gather(t if is_root else None, own, root),
            size,
            everything if is_root else blank(size).cpu(),
        ),
    )
    yield (
        "scatter",
        lambda: into(
            lambda t: comm.scatter(t, wide if is_root else None, root), 1, inputs[root][rank]
        ),
    )
    yield "all_gather", lambda: into(lambda t: comm.all_gather(t, own), size, everything)
    combined = [torch.stack([inputs[source][part] for source in ranks]).sum(0) for part in ranks]
    yield (
        "reduce_scatter",
        lambda: into(lambda t: comm.reduce_scatter(t, wide), 1, combined[rank]),
    )
    yield "reduce_scatter, gather", lambda: into(whole, size, torch.cat(combined))
    mine = torch.cat([inputs[source][rank] for source in ranks])
    yield "all_to_all", lambda: into(lambda t: comm.all_to_all(t, wide), size, mine)
    if size > 1:  # alone there is nobody to write to
        yield from _messages(comm, own, blank, narrow)


def _messages(
    comm: Communicator,
    own: torch.Tensor,
    blank: Callable[[], torch.Tensor],
    narrow: Sequence[torch.Tensor],
) -> Iterator[tuple[str, Callable[[], PreparedCall]]]:
    """Point to point, each rank to the next one of a ring."""
    rank, size = comm.rank, comm.size
    following, previous = (rank + 1) % size, (rank - 1) % size

    def blocking(tensor: torch.Tensor) -> None:
        if rank == 0:  # one begins by sending, the others by receiving: nobody waits in a circle
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

    def around(ring: Callable[[torch.Tensor], None]) -> Callable[[], PreparedCall]:
        def prepare() -> PreparedCall:
            tensor = blank()
            return PreparedCall(lambda: ring(tensor), [tensor], [narrow[previous]])

        return prepare

    yield "send, recv", around(blocking)
    yield "isend, irecv", around(begun)
    yield "batch_isend_irecv", around(batched)
