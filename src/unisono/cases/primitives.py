"""The table of collectives. csrc/unisono.h has the same for the engine (`un_is_rooted`, ...)."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, NamedTuple


class Counts(NamedTuple):
    """Elements: of a call as nccl-tests counts them, of the output and of the input of one rank."""

    size: int
    output: int
    input: int


class Primitive(NamedTuple):
    """A collective. `wide` names the sides that have a part for each rank: "output", "input" or
    both; without any it works in place. `is_rooted`: data goes from one rank, the root, or to it.
    `is_empty`: it moves no data. Other operations, such as messages, are not `is_collective`."""

    name: str
    wide: tuple[str, ...] = ()
    reduces: bool = False
    is_rooted: bool = False
    is_empty: bool = False
    is_collective: bool = True

    @property
    def is_in_place(self) -> bool:
        return self.is_collective and not (self.wide or self.is_empty)

    @property
    def is_to_root(self) -> bool:
        """Whether only the root gets a result."""
        return self.is_rooted and (self.reduces or "output" in self.wide)

    @property
    def is_from_root(self) -> bool:
        """Whether only the root's input counts."""
        return self.is_rooted and not self.is_to_root

    @property
    def is_pairwise(self) -> bool:
        """Whether sizes may differ from one pair of ranks to another."""
        return bool(self.wide) and (self.is_rooted or len(self.wide) > 1)

    @property
    def is_meeting(self) -> bool:
        """Whether no rank finishes it before all ranks have begun it, if all have data."""
        return self.is_collective and not self.is_rooted

    def bus_factor(self, ranks: int) -> Fraction:
        """busbw / algbw, as in nccl-tests' PERFORMANCE.md."""
        if self.wide:
            return Fraction(ranks - 1, ranks)
        is_all_reduce = self.is_meeting and not self.is_empty
        return Fraction(2 * (ranks - 1), ranks) if is_all_reduce else Fraction(1)

    def counts(self, nbytes: int, item_bytes: int, ranks: int) -> Counts:
        """The elements for a size of `nbytes`: a wide side has that size."""
        if self.is_empty:
            return Counts(0, 0, 0)
        whole = max(1, nbytes // item_bytes)
        if not self.wide:
            return Counts(whole, whole, whole)
        part = max(1, whole // ranks)
        sizes = {side: part * ranks if side in self.wide else part for side in ("output", "input")}
        return Counts(part * ranks, **sizes)

    def has_side(self, side: str, is_root: bool) -> bool:
        """Whether a rank passes an "output" or "input": only the root has the wide side of a gather
        or scatter."""
        if self.is_empty or (self.is_in_place and side == "input"):
            return False
        return is_root or not self.is_rooted or side not in self.wide

    def arguments(
        self, output: Any, input: Any, root: int, op: Any, is_root: bool
    ) -> tuple[Any, ...]:
        """The arguments of the Communicator's method of this name."""
        if self.is_empty:
            return ()
        sides = [
            tensor if self.has_side(side, is_root) else None
            for side, tensor in (("output", output), ("input", input))
        ]
        more = [root] * self.is_rooted + [op] * self.reduces
        return (*sides[: 1 if self.is_in_place else 2], *more)


_OUTPUT, _INPUT = ("output",), ("input",)
PRIMITIVES = {
    primitive.name: primitive
    for primitive in (
        Primitive("all_reduce", reduces=True),
        Primitive("reduce_scatter", _INPUT, reduces=True),
        Primitive("all_gather", _OUTPUT),
        Primitive("broadcast", is_rooted=True),
        Primitive("reduce", reduces=True, is_rooted=True),
        Primitive("scatter", _INPUT, is_rooted=True),
        Primitive("gather", _OUTPUT, is_rooted=True),
        Primitive("all_to_all", ("output", "input")),
        Primitive("barrier", is_empty=True),
    )
}


def primitive_of(operation: str) -> Primitive:
    """The entry of an operation, which may also be a message."""
    return PRIMITIVES.get(operation) or Primitive(operation, is_collective=False)
