"""Steps of random scenarios: how they are drawn, what one rank does, and what it must have
afterwards.

Every rank's data depends only on the step's seed, so all ranks know the result.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy
import torch

from expected import assert_same, reduced, values
from unisono import PremulSum
from unisono.comm.communicator import Communicator
from unisono.comm.work import Work

COLLECTIVES = (
    "barrier",
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "gather",
    "scatter",
    "all_to_all",
)
SMALL, FLOOD = 60, 600
"""In a ring, messages with fewer elements are sent in this number."""


@dataclass(frozen=True)
class Step:
    """Something that ranks of one group do. `root` and `peer` are ranks of the group.

    A "message" goes from `root` to `peer`; in a "ring" every rank sends to the next one, hundreds
    of messages if they are small; "coalesced" reduces many tensors at once. `counts` is a table:
    how many elements each rank has for each. `later` is the number of steps after which the rank
    waits for the work; 0: it blocks. The receiver of a message has `peer_later`.
    """

    group: int
    kind: str
    dtype: torch.dtype
    counts: tuple[int, ...]
    op: str | PremulSum
    root: int
    peer: int
    later: int
    peer_later: int
    seed: int
    strided: bool = False

    def __str__(self) -> str:
        return repr(replace(self, counts=self.counts[:1]) if self.is_even else self)

    @property
    def is_even(self) -> bool:
        """Whether all ranks have the same number of elements for each."""
        return len(set(self.counts)) == 1

    def members(self, groups: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """The ranks of the world that take part."""
        group = groups[self.group]
        return (group[self.root], group[self.peer]) if self.kind == "message" else group

    def later_on(self, rank: int) -> int:
        """After how many steps this rank of the group waits for its work."""
        return self.peer_later if self.kind == "message" and rank == self.peer else self.later


def draw_step(
    chance: random.Random,
    groups: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
    counts: Sequence[int],
    kinds: Sequence[str] = (*COLLECTIVES, "message", "message", "message", "ring"),
    group: int | None = None,
) -> Step:
    """A step in which all ranks have the same number of elements for each: one of `counts`."""
    if group is None:
        group = chance.randrange(len(groups))
    size = len(groups[group])
    if size == 1:
        kinds = [kind for kind in kinds if kind not in ("message", "ring")]
    root = chance.randrange(size)
    return Step(
        group,
        chance.choice(kinds),
        chance.choice(dtypes),
        (chance.choice(counts),) * size**2,
        chance.choice(("sum", "max")),
        root,
        (root + chance.randrange(1, max(size, 2))) % size,
        chance.choice((0, 0, 1, 3, 9)),
        chance.choice((0, 0, 1, 3, 9)),
        chance.randrange(1 << 30),
    )


class RankStep:
    """This rank's part in a step. Once it has begun, `works` are still to be waited for; if empty,
    it is over."""

    def __init__(self, group: Communicator, step: Step) -> None:
        self.group = group
        self.step = step
        self.later = step.later_on(group.rank)
        self.works: list[Work] = []
        self._count = step.counts[0]
        self._even = step.is_even
        self._outputs: list[torch.Tensor] = []
        self._untouched: list[torch.Tensor] = []
        self._expected: list[torch.Tensor] = []

    def begin(self) -> None:
        """Start the step; finish it if it blocks."""
        if self.step.kind == "message":
            begun = [self._message()]
        elif self.step.kind == "ring":
            begun = self._ring()
        elif self.step.kind in ("barrier", "all_reduce", "reduce", "broadcast", "coalesced"):
            begun = [self._whole_tensors()]
        else:
            begun = [self._parts()]
        self.works = [work for work in begun if work is not None]

    def check(self) -> None:
        """The step has succeeded: the result must be right."""
        for output, expected in zip(self._outputs, self._expected, strict=True):
            assert_same(output.contiguous(), expected, f"{self.step}"[:300])

    def check_untouched(self) -> None:
        """The ranks' calls differed: nothing may have changed."""
        for output, before in zip(self._outputs, self._untouched, strict=True):
            assert_same(output.contiguous(), before, f"changed by {self.step}"[:300])

    # -- data ----------------------------------------------------------------------------------

    def _values(self, rank: int, count: int) -> torch.Tensor:
        return values(self.step.dtype, count, self.step.seed, rank)

    def _row(self, rank: int) -> list[torch.Tensor]:
        """What a rank has for each."""
        counts = self._table()[rank]
        return list(self._values(rank, sum(counts)).split(counts))

    def _table(self) -> list[list[int]]:
        size = self.group.size
        table: list[list[int]] = numpy.array(self.step.counts).reshape(size, size).tolist()
        return table

    def _lay(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy, contiguous or strided."""
        if not self.step.strided:
            return tensor.clone()
        gaps = torch.zeros(tensor.numel(), 2, dtype=tensor.dtype)
        gaps[:, 0] = tensor
        return gaps[:, 0]

    def _expect(
        self, expected: list[torch.Tensor], outputs: list[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """Record what `outputs`, or new tensors, must hold; return them."""
        if outputs is None:
            outputs = [self._lay(torch.zeros_like(tensor)) for tensor in expected]
        self._outputs, self._expected = outputs, expected
        self._untouched = [tensor.contiguous().clone() for tensor in outputs]
        return outputs

    def _join(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """Parts for all ranks: one tensor if all have the same length."""
        return [torch.cat(parts)] if self._even else parts

    def _argument(self, parts: list[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
        return parts[0] if self._even else parts

    # -- calls ---------------------------------------------------------------------------------

    def _message(self) -> Work | None:
        group, step, tag = self.group, self.step, self.step.seed % 3
        if group.rank != step.peer:
            mine = self._values(group.rank, self._count)
            if self.later:
                return group.isend(mine, step.peer, tag)
            group.send(mine, step.peer, tag)
            return None
        (output,) = self._expect([self._values(step.root, self._count)])
        if self.later:
            return group.irecv(output, step.root, tag)
        assert group.recv(output, step.root, tag) == step.root
        return None

    def _ring(self) -> list[Work | None]:
        group, count = self.group, self._count
        before, after = (group.rank - 1) % group.size, (group.rank + 1) % group.size
        # hundreds of small ones: more than can be announced at once
        rows = FLOOD if count < SMALL else 1
        expected = self._values(before, rows * count).reshape(rows, count)
        (output,) = self._expect([expected], [torch.zeros_like(expected)])
        mine = self._values(group.rank, rows * count).reshape(rows, count)
        sends = [group.isend(mine[row], after, 9 + row) for row in range(rows)]
        return [*(group.irecv(output[row], before, 9 + row) for row in range(rows)), *sends]

    def _whole_tensors(self) -> Work | None:
        group, step, later = self.group, self.step, self.later > 0
        if step.kind == "barrier":
            return group.barrier(async_op=later)
        counts = step.counts if step.kind == "coalesced" else (self._count,)
        given = [[self._values(rank, count) for rank in range(group.size)] for count in counts]
        mine = [self._lay(tensors[group.rank]) for tensors in given]
        if step.kind == "broadcast":
            (output,) = self._expect([tensors[step.root] for tensors in given], mine)
            return group.broadcast(output, step.root, async_op=later)
        if step.kind == "reduce" and group.rank != step.root:
            (output,) = self._expect([tensors[group.rank] for tensors in given], mine)
            return group.reduce(output, step.root, step.op, async_op=later)
        outputs = self._expect([reduced(tensors, step.op) for tensors in given], mine)
        if step.kind == "reduce":
            return group.reduce(outputs[0], step.root, step.op, async_op=later)
        tensors = outputs if step.kind == "coalesced" else outputs[0]
        return group.all_reduce(tensors, step.op, async_op=later)

    def _parts(self) -> Work | None:
        group, step, later = self.group, self.step, self.later > 0
        ranks, me, at_root = range(group.size), group.rank, group.rank == step.root
        if step.kind == "reduce_scatter":
            counts = self._table()[0]
            every = [self._values(rank, sum(counts)) for rank in ranks]
            (output,) = self._expect([reduced(every, step.op).split(counts)[me]])
            given = self._argument(self._join(list(every[me].split(counts))))
            return group.reduce_scatter(output, given, step.op, async_op=later)
        if step.kind == "scatter":
            (output,) = self._expect([self._row(step.root)[me]])
            given_by_root = self._argument(self._join(self._row(me))) if at_root else None
            return group.scatter(output, given_by_root, step.root, async_op=later)
        if step.kind == "all_to_all":
            outputs = self._expect(self._join([self._row(rank)[me] for rank in ranks]))
            mine = [self._lay(tensor) for tensor in self._join(self._row(me))]
            return group.all_to_all(self._argument(outputs), self._argument(mine), async_op=later)
        own = self._lay(self._row(me)[0])
        if step.kind == "gather" and not at_root:
            return group.gather(None, own, step.root, async_op=later)
        outputs = self._expect(self._join([self._row(rank)[0] for rank in ranks]))
        if step.kind == "gather":
            return group.gather(self._argument(outputs), own, step.root, async_op=later)
        return group.all_gather(self._argument(outputs), own, async_op=later)
