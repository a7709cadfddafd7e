"""One case, run by one rank through torch.distributed on the group's backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist

from torch_names import all_gather_single, reduce_scatter_single
from torch_parity.arithmetic import Row, bits_of, combined, factor_of, numbers
from torch_parity.matrix import Case
from torch_parity.memory import ScratchedError, Slab, WrongResultError, distinct, part_size


def check_call(case: Case, async_op: bool = False) -> None:
    """Make the call, then check every tensor of this rank, including those that are only read."""
    _Rank(case, dist.get_rank(), dist.get_world_size(), async_op).call_and_check()


class _Rank:
    def __init__(self, case: Case, rank: int, size: int, async_op: bool) -> None:
        self.case = case
        self.async_op = async_op
        self.rank = rank
        self.size = size
        self.root = size - 1
        self.inner = case.layout
        if case.layout == "mixed":
            self.inner = "transposed" if rank % 2 else "contiguous"
        self.outer = "contiguous" if case.layout == "expanded" else self.inner

    def call_and_check(self) -> None:
        getattr(self, f"_{self.case.collective}")()

    # -- numbers and tensors ---------------------------------------------------------------------

    def _row(self, rank: int, part: int = 0, size_of: int = 0) -> Row:
        """One part of a rank's input; `size_of` says whose part it is if parts differ in size."""
        count = part_size(self.case.layout, size_of)
        few = distinct(self.case.layout, count)
        seed = f"{rank} {0 if self.case.layout == 'expanded' else part}"
        return numbers(self.case.dtype, few, seed) * (count // few if few else 1)

    def _given(self, *rows: Row) -> Slab:
        every = bits_of(self.case.dtype, sum(rows, ()))
        return Slab(self.inner, self.case.dtype, len(rows[0]), len(rows), every)

    def _empty(self, part: int = 0, parts: int = 1) -> Slab:
        return Slab(self.outer, self.case.dtype, part_size(self.case.layout, part), parts)

    def _expect(self, slab: Slab, *rows: Row, read: Iterable[Slab] = ()) -> None:
        """The slab holds these rows, and rows that were only read are unchanged."""
        slab.must_hold(bits_of(self.case.dtype, sum(rows, ())))
        for input in read:
            input.must_be_unchanged()

    def _reduced(self, part: int = 0, size_of: int = 0) -> Row:
        rows = tuple(self._row(peer, part, size_of) for peer in range(self.size))
        return combined(self.case.op, self.case.dtype, rows)

    @property
    def _op(self) -> Any:
        if self.case.op == "PREMUL_SUM":
            return dist._make_nccl_premul_sum(factor_of(self.case.dtype))
        return getattr(dist.ReduceOp, self.case.op)

    def _call(self, collective: Callable[..., Any], *args: Any) -> None:
        work = collective(*args, async_op=self.async_op)
        assert (work is not None) == self.async_op
        if work is not None:
            work.wait()

    # -- collectives -----------------------------------------------------------------------------

    def _all_reduce(self) -> None:
        slab = self._given(self._row(self.rank))
        self._call(dist.all_reduce, slab.tensor, self._op)
        self._expect(slab, self._reduced())

    def _reduce(self) -> None:
        slab = self._given(self._row(self.rank))
        self._call(dist.reduce, slab.tensor, self.root, self._op)
        if self.rank == self.root:
            self._expect(slab, self._reduced())
            return
        try:
            self._expect(slab, self._row(self.rank))
        except WrongResultError as error:
            raise ScratchedError(str(error)) from None

    def _broadcast(self) -> None:
        slab = self._given(self._row(self.rank))
        self._call(dist.broadcast, slab.tensor, self.root)
        self._expect(slab, self._row(self.root))

    def _all_gather(self) -> None:
        given = self._given(self._row(self.rank, size_of=self.rank))
        taken = [self._empty(peer) for peer in range(self.size)]
        self._call(dist.all_gather, [slab.tensor for slab in taken], given.tensor)
        self._expect_from_each(taken, given)

    def _expect_from_each(self, taken: list[Slab], given: Slab) -> None:
        given.must_be_unchanged()
        for peer, slab in enumerate(taken):
            self._expect(slab, self._row(peer, size_of=peer))

    def _all_gather_single(self) -> None:
        given = self._given(self._row(self.rank))
        taken = self._empty(parts=self.size)
        self._call(all_gather_single, taken.tensor, given.tensor)
        self._expect(taken, *(self._row(peer) for peer in range(self.size)), read=[given])

    def _gather(self) -> None:
        given = self._given(self._row(self.rank, size_of=self.rank))
        taken = [self._empty(peer) for peer in range(self.size)] if self.rank == self.root else []
        self._call(dist.gather, given.tensor, [slab.tensor for slab in taken] or None, self.root)
        self._expect_from_each(taken, given)

    def _scatter(self) -> None:
        given = [self._given(self._row(self.root, part, part)) for part in range(self.size)]
        taken = self._empty(self.rank)
        sent = [slab.tensor for slab in given] if self.rank == self.root else None
        self._call(dist.scatter, taken.tensor, sent, self.root)
        self._expect(taken, self._row(self.root, self.rank, self.rank), read=given)

    def _reduce_scatter(self) -> None:
        given = [self._given(self._row(self.rank, part, part)) for part in range(self.size)]
        taken = self._empty(self.rank)
        self._call(dist.reduce_scatter, taken.tensor, [slab.tensor for slab in given], self._op)
        self._expect(taken, self._reduced(self.rank, self.rank), read=given)

    def _reduce_scatter_single(self) -> None:
        given = self._given(*(self._row(self.rank, part) for part in range(self.size)))
        taken = self._empty()
        self._call(reduce_scatter_single, taken.tensor, given.tensor, self._op)
        self._expect(taken, self._reduced(self.rank), read=[given])

    def _all_to_all(self) -> None:
        # If parts differ, the one from i to j has the size of part i + 2j.
        given = [
            self._given(self._row(self.rank, peer, self.rank + 2 * peer))
            for peer in range(self.size)
        ]
        taken = [self._empty(peer + 2 * self.rank) for peer in range(self.size)]
        self._call(
            dist.all_to_all, [slab.tensor for slab in taken], [slab.tensor for slab in given]
        )
        for peer, slab in enumerate(taken):
            self._expect(slab, self._row(peer, self.rank, peer + 2 * self.rank))
        for slab in given:
            slab.must_be_unchanged()

    def _all_to_all_single(self) -> None:
        given = self._given(*(self._row(self.rank, peer) for peer in range(self.size)))
        taken = self._empty(parts=self.size)
        self._call(dist.all_to_all_single, taken.tensor, given.tensor)
        self._expect(
            taken, *(self._row(peer, self.rank) for peer in range(self.size)), read=[given]
        )

    def _send_recv(self) -> None:
        given = self._given(self._row(self.rank))
        taken = self._empty()
        before, after = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        sent = dist.isend(given.tensor, after)
        assert dist.recv(taken.tensor, before) == before
        assert sent is not None
        sent.wait()
        self._expect(taken, self._row(before), read=[given])
