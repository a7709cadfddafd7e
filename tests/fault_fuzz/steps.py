"""What one rank does in one step of a random scenario, and what it must have afterwards.

Every rank's data follow from the step's number, so that all know the result.
"""

from __future__ import annotations

import torch

from expected import assert_same
from fault_fuzz.scenarios import Step
from unisono.comm.base import Communicator, Work

SMALL, FLOOD = 60, 600
"""In a ring, messages of fewer elements come by so many."""


class RankStep:
    """This rank's part in a step. Once begun, `works` are to be waited for; none: it is over."""

    def __init__(self, group: Communicator, step: Step, number: int) -> None:
        self.group = group
        self.step = step
        self.number = number
        self.dtype = getattr(torch, step.dtype)
        self.receives = step.kind == "message" and group.rank == step.peer
        self.works: list[Work] = []
        self._output = torch.zeros(0)
        self._untouched = self._expected = self._output

    def begin(self) -> None:
        """Start the step; carry it out, if it blocks."""
        if self.step.kind == "message":
            begun = [self._message()]
        elif self.step.kind == "ring":
            begun = self._ring()
        else:
            begun = [self._collective()]
        self.works = [work for work in begun if work is not None]

    def check(self) -> None:
        """The step has ended well: the result must be right."""
        assert_same(self._output, self._expected, self.step)

    def check_untouched(self) -> None:
        """The ranks differed: nothing may have changed."""
        assert_same(self._output, self._untouched, f"changed by {self.step}")

    def _piece(self, rank: int, length: int) -> torch.Tensor:
        return (torch.arange(length) % 11 + self.number % 13 + rank).to(self.dtype)

    def _reduced(self, length: int) -> torch.Tensor:
        base = torch.arange(length) % 11 + self.number % 13
        size = self.group.size
        if self.step.op == "max":
            return (base + size - 1).to(self.dtype)
        return (base * size + size * (size - 1) // 2).to(self.dtype)

    def _expect(self, expected: torch.Tensor, output: torch.Tensor | None = None) -> torch.Tensor:
        """Note what `output`, or new memory, must hold; return it."""
        self._output = torch.zeros_like(expected) if output is None else output
        self._untouched = self._output.clone()
        self._expected = expected
        return self._output

    def _message(self) -> Work | None:
        group, step, tag = self.group, self.step, self.number % 3
        if not self.receives:
            mine = self._piece(group.rank, step.count)
            if step.later:
                return group.isend(mine, step.peer, tag)
            group.send(mine, step.peer, tag)
            return None
        output = self._expect(self._piece(step.root, step.count))
        if step.peer_later:
            return group.irecv(output, step.root, tag)
        assert group.recv(output, step.root, tag) == step.root
        return None

    def _ring(self) -> list[Work | None]:
        group, count = self.group, self.step.count
        before, after = (group.rank - 1) % group.size, (group.rank + 1) % group.size
        # small ones by the hundred: more than may be announced at once
        rows = FLOOD if count < SMALL else 1
        output = self._expect(self._piece(before, rows * count).reshape(rows, count))
        mine = self._piece(group.rank, rows * count).reshape(rows, count)
        sends = [group.isend(mine[row], after, 9 + row) for row in range(rows)]
        return [*(group.irecv(output[row], before, 9 + row) for row in range(rows)), *sends]

    def _collective(self) -> Work | None:
        group, step, count = self.group, self.step, self.step.count
        me, root, later = group.rank, step.root, step.later > 0
        at_root = me == root
        mine, wide = self._piece(me, count), self._piece(me, count * group.size)

        def parts_of_mine(whole: torch.Tensor) -> torch.Tensor:
            return whole[me * count : (me + 1) * count]

        if step.kind == "barrier":
            return group.barrier(async_op=later)
        if step.kind == "all_reduce":
            output = self._expect(self._reduced(count), mine)
            return group.all_reduce(output, step.op, async_op=later)
        if step.kind == "reduce":
            output = self._expect(self._reduced(count) if at_root else mine.clone(), mine)
            return group.reduce(output, root, step.op, async_op=later)
        if step.kind == "broadcast":
            output = self._expect(self._piece(root, count), mine)
            return group.broadcast(output, root, async_op=later)
        if step.kind == "reduce_scatter":
            output = self._expect(parts_of_mine(self._reduced(count * group.size)))
            return group.reduce_scatter(output, wide, step.op, async_op=later)
        if step.kind == "scatter":
            output = self._expect(parts_of_mine(self._piece(root, count * group.size)))
            return group.scatter(output, wide if at_root else None, root, async_op=later)
        if step.kind == "all_to_all":
            every = [self._piece(rank, count * group.size) for rank in range(group.size)]
            output = self._expect(torch.cat([parts_of_mine(row) for row in every]))
            return group.all_to_all(output, wide, async_op=later)
        gathered = torch.cat([self._piece(rank, count) for rank in range(group.size)])
        if step.kind == "all_gather":
            return group.all_gather(self._expect(gathered), mine, async_op=later)
        if not at_root:
            return group.gather(None, mine, root, async_op=later)
        return group.gather(self._expect(gathered), mine, root, async_op=later)
