"""Named axes over ranks: which ranks form which groups, before any process starts.

The last axis varies fastest: in `Mesh({"dp": 2, "tp": 4})` ranks 0, 1, 2, 3 differ only in tp, and
ranks 0 and 4 only in dp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd, prod

import numpy as np
import numpy.typing as npt

from unisono.errors import name_number

Ranks = npt.NDArray[np.int64]

_SUGGESTIONS = 3
_NODE_SIZE = 8
_LISTED_RANKS = 64  # a mesh of up to this many ranks is described group by group
_SHOWN_MEMBERS = 8


@dataclass(frozen=True, init=False, repr=False)
class Mesh:
    """Ranks 0, 1, ... laid out along named axes, the last one fastest; `sizes` maps each axis to
    its number of ranks.

    A mesh is a value: it never changes, and two with the same axes, sizes and order are equal.
    Raises ValueError for no axes, a size below 1 or a name that is not an identifier. See also
    `ProcessGroupManager`.

    >>> mesh = unisono.Mesh({"dp": 2, "tp": 4})
    >>> mesh.size, mesh["tp"], mesh.axes
    (8, 4, ('dp', 'tp'))
    """

    axes: tuple[str, ...]
    shape: tuple[int, ...]

    def __init__(self, sizes: Mapping[str, int]) -> None:
        object.__setattr__(self, "axes", tuple(sizes))
        object.__setattr__(self, "shape", tuple(sizes.values()))
        if not sizes:
            raise ValueError("a mesh needs at least one axis")
        for axis, size in sizes.items():
            if not isinstance(axis, str) or not axis.isidentifier():
                raise ValueError(f"{axis!r} cannot name an axis")
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"axis {axis} has {size!r} ranks: it must be a whole number >= 1")

    @cached_property
    def size(self) -> int:
        return prod(self.shape)

    def __getitem__(self, axis: str) -> int:
        """The size of an axis."""
        return self.shape[self._position(axis)]

    def __repr__(self) -> str:
        return f"Mesh({dict(zip(self.axes, self.shape, strict=True))})"

    def __str__(self) -> str:
        return _product(self.axes, self.shape)

    # -- ranks and coordinates -------------------------------------------------------------------

    def coordinates(self, global_rank: int) -> dict[str, int]:
        """The position of rank `global_rank` along each axis. Raises ValueError if there is no such
        rank.

        >>> unisono.Mesh({"dp": 2, "tp": 4}).coordinates(5)
        {'dp': 1, 'tp': 1}
        """
        if not 0 <= global_rank < self.size:
            raise ValueError(f"there is no rank {global_rank} among {self.size:,} ranks")
        where = np.unravel_index(global_rank, self.shape)
        return {axis: int(position) for axis, position in zip(self.axes, where, strict=True)}

    def rank_at(self, **coordinates: int) -> int:
        """The rank at these `coordinates`; an axis that is not named is at 0. Raises ValueError for
        a position outside its axis or an unknown axis.

        >>> unisono.Mesh({"dp": 2, "tp": 4}).rank_at(dp=1, tp=1)
        5
        """
        for axis, at in coordinates.items():
            if not 0 <= at < self[axis]:
                raise ValueError(f"{axis}={at} is outside the axis: it has {self[axis]} ranks")
        where = tuple(coordinates.get(axis, 0) for axis in self.axes)
        return int(np.ravel_multi_index(where, self.shape))

    def next(self, global_rank: int, axis: str, *, cyclic: bool = False) -> int | None:
        """The rank after `global_rank` along an `axis`. At the end of the axis None, or the first
        rank if `cyclic`. Raises ValueError if there is no such rank or axis.

        >>> mesh = unisono.Mesh({"dp": 2, "tp": 4})
        >>> mesh.next(3, "dp"), mesh.next(3, "tp"), mesh.next(3, "tp", cyclic=True)
        (7, None, 0)
        """
        return self._neighbour(global_rank, axis, 1, cyclic)

    def prev(self, global_rank: int, axis: str, *, cyclic: bool = False) -> int | None:
        """The rank before `global_rank` along an `axis`. At the start of the axis None, or the last
        rank if `cyclic`. Raises ValueError if there is no such rank or axis.

        >>> unisono.Mesh({"dp": 2, "tp": 4}).prev(4, "dp")
        0
        """
        return self._neighbour(global_rank, axis, -1, cyclic)

    def _neighbour(self, global_rank: int, axis: str, step: int, cyclic: bool) -> int | None:
        where = self.coordinates(global_rank)
        position, size = where[self.axes[self._position(axis)]] + step, self[axis]
        if not cyclic and not 0 <= position < size:
            return None
        return self.rank_at(**{**where, axis: position % size})

    # -- groups ----------------------------------------------------------------------------------

    def groups(self, *axes: str) -> list[list[int]]:
        """All groups whose members differ only along these `axes`: each rank is in exactly one.

        Members are in ascending order, in whatever order you name the axes. Raises ValueError for
        an axis that does not exist or is named twice.

        >>> unisono.Mesh({"dp": 2, "tp": 2}).groups("dp")
        [[0, 2], [1, 3]]
        """
        groups: list[list[int]] = self._groups(axes).tolist()
        return groups

    def members(self, global_rank: int, *axes: str) -> list[int]:
        """The group along these `axes` that the rank `global_rank` is in, in ascending order.
        Raises ValueError if there is no such rank or axis.

        >>> unisono.Mesh({"dp": 2, "tp": 2}).members(3, "dp")
        [1, 3]
        """
        where = self.coordinates(global_rank)
        asked = self._positions(axes)
        index = tuple(
            slice(None) if position in asked else where[axis]
            for position, axis in enumerate(self.axes)
        )
        members: list[int] = self._grid[index].ravel().tolist()
        return members

    @property
    def _grid(self) -> Ranks:
        return np.arange(self.size, dtype=np.int64).reshape(self.shape)

    def _groups(self, axes: Sequence[str]) -> Ranks:
        """One row per group, in the order of the groups' first members."""
        asked = self._positions(axes)
        others = [position for position in range(len(self.axes)) if position not in asked]
        size = prod(self.shape[position] for position in asked)
        return self._grid.transpose(*others, *asked).reshape(-1, size)

    # -- does it fit? ----------------------------------------------------------------------------

    def check_world(self, world_size: int) -> None:
        """Check that the mesh has exactly `world_size` ranks. Raises ValueError, with meshes that
        would fit, if it does not.

        >>> unisono.Mesh({"dp": 2, "tp": 4}).check_world(12)
        Traceback (most recent call last):
            ...
        ValueError: dp 2 x tp 4 = 8 ranks, but the world has 12. What fits: dp 3 x tp 4; ...
        """
        if self.size == world_size:
            return
        if world_size < 1:
            raise ValueError(f"a world needs at least one rank, not {world_size}")
        fitting = "; ".join(_product(self.axes, shape) for shape in self._nearest(world_size))
        raise ValueError(
            f"{self} = {name_number(self.size, 'rank')}, but the world has {world_size:,}. "
            f"What fits: {fitting}"
        )

    def _nearest(self, world_size: int) -> list[tuple[int, ...]]:
        """Shapes of `world_size` ranks with one axis changed, the first one if possible. If there
        are none, each axis keeps its largest factor that divides, and the first takes the rest."""
        found = []
        for at, size in enumerate(self.shape):
            changed, rest = divmod(world_size * size, self.size)
            if not rest:
                found.append((*self.shape[:at], changed, *self.shape[at + 1 :]))
        if found:
            return found[:_SUGGESTIONS]
        shape: list[int] = []
        for size in reversed(self.shape[1:]):
            shape.insert(0, gcd(size, world_size))
            world_size //= shape[0]
        return [(world_size, *shape)]

    # -- for people ------------------------------------------------------------------------------

    def describe(
        self, ranks_per_node: int = _NODE_SIZE, joint: Sequence[Sequence[str]] = ()
    ) -> str:
        """A table of every axis and every `joint` group of axes: the number of groups, their size,
        how far apart their members are, and how many nodes a group spans. Ranks fill nodes of
        `ranks_per_node` one after another. A mesh of up to 64 ranks is also listed group by group.

        Raises ValueError for a node without ranks.

        >>> print(unisono.Mesh({"dp": 2, "tp": 2}).describe(ranks_per_node=2))
        4 ranks: dp 2 x tp 2, tp fastest; 2 nodes of 2 ranks
        axis  size  groups  stride  reach          with rank 0
        tp       2       2       1  within a node  0 1
        dp       2       2       2  2 nodes        0 2
        ...
        """
        if ranks_per_node < 1:
            raise ValueError(f"a node needs at least one rank, not {ranks_per_node}")
        on_node = np.arange(self.size) // ranks_per_node
        filled = f"{name_number(int(on_node[-1]) + 1, 'node')} of "
        filled += name_number(ranks_per_node, "rank")
        lines = [f"{name_number(self.size, 'rank')}: {self}, {self.axes[-1]} fastest; {filled}"]
        asked = [*((axis,) for axis in reversed(self.axes)), *(tuple(axes) for axes in joint)]
        head = ("axis", "size", "groups", "stride", "reach", "with rank 0")
        lines += _aligned([head, *(self._row(axes, on_node) for axes in asked)])
        if self.size <= _LISTED_RANKS:
            lines.append("")
            for axes in asked:
                groups = " | ".join(_listed(group, self.size) for group in self.groups(*axes))
                lines.append(f"{'+'.join(axes)}: {groups}")
        return "\n".join(lines)

    def _row(self, axes: Sequence[str], on_node: Ranks) -> tuple[str, ...]:
        groups = self._groups(axes)
        size = groups.shape[1]
        steps = np.unique(np.diff(groups, axis=1))
        stride = "-" if not steps.size else f"{steps[0]:,}" if steps.size == 1 else "mixed"
        theirs = np.sort(on_node[groups], axis=1)  # count the changes
        reach = 1 + np.count_nonzero(np.diff(theirs, axis=1), axis=1)
        least, most = int(reach.min()), int(reach.max())
        if most == 1:
            where = "within a node"
        else:
            where = f"{least:,} to {most:,} nodes" if least < most else f"{most:,} nodes"
        return (
            "+".join(axes),
            f"{size:,}",
            f"{len(groups):,}",
            stride,
            where,
            _listed(groups[0].tolist(), _SHOWN_MEMBERS),
        )

    # -- axes ------------------------------------------------------------------------------------

    def _position(self, axis: str) -> int:
        if axis not in self.axes:
            raise ValueError(f"there is no axis {axis!r}: the axes are {', '.join(self.axes)}")
        return self.axes.index(axis)

    def _positions(self, axes: Sequence[str]) -> list[int]:
        """The axes in the order of the mesh, so that the members of a group ascend."""
        positions = sorted(self._position(axis) for axis in axes)
        if not positions:
            raise ValueError(f"name at least one axis of {', '.join(self.axes)}")
        if len(set(positions)) != len(positions):
            raise ValueError(f"an axis is named twice: {', '.join(axes)}")
        return positions


def _product(axes: Sequence[str], shape: Sequence[int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in zip(axes, shape, strict=True))


def _listed(ranks: Sequence[int], most: int) -> str:
    """ "0 8 16 ... 504": all ranks, or the first few and the last."""
    if len(ranks) <= most:
        return " ".join(map(str, ranks))
    return " ".join(map(str, ranks[: most - 1])) + f" ... {ranks[-1]}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows with their columns aligned; all but the first and the last two hold numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if 0 < at < len(row) - 2 else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
