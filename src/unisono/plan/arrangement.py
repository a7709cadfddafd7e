"""Where the ranks of a schedule are drawn, which depends on who talks to whom: as one or two trees,
a grid, or otherwise a circle. Coordinates run from 0 to 1, to the right and downwards."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from unisono.plan.draw import Tree, depth_in, trees
from unisono.plan.schedule import Schedule

Point = tuple[float, float]
Pair = tuple[int, int]
_MOST_PAIRS = 2_000  # more lines than this are a blot


@dataclass(frozen=True)
class Place:
    """One picture of all ranks: a point for each, and the pairs that talk, drawn as lines."""

    points: Sequence[Point]
    pairs: Sequence[Pair]


@dataclass(frozen=True)
class Arrangement:
    """`kind` is "circle", "tree", "trees" or "grid"; `aspect` width by height. Two trees have two
    places, the second one for the chunks `second`; `arcs` are the angles at which each host begins
    and ends on a circle."""

    kind: str
    aspect: float
    places: Sequence[Place]
    second: Sequence[int] = ()
    arcs: Sequence[Point] = ()

    def as_data(self) -> dict[str, Any]:
        """The arrangement as JSON values."""
        data = asdict(self)
        for place in data["places"]:
            place["points"] = [[round(x, 5), round(y, 5)] for x, y in place["points"]]
            place["pairs"] = place["pairs"] if len(place["pairs"]) <= _MOST_PAIRS else ()
        return data


def arrange(schedule: Schedule, node_size: int) -> Arrangement:
    ranks = schedule.ranks
    pairs = talking_pairs(schedule)
    if tree := _as_tree(ranks, pairs, schedule.root):
        depth = [depth_in(tree, rank) for rank in range(ranks)]
        if max(depth) <= 2 * math.log2(max(ranks, 2)) + 1:
            return Arrangement("tree", 1.9, [Place(_tidy(tree, depth), pairs)])
    elif (found := trees(schedule)) and len(found) == 2:
        return _two_trees(ranks, found)
    if columns := _grid_columns(ranks, pairs):
        return _grid(ranks, columns, pairs)
    return _circle(ranks, pairs, node_size)


def talking_pairs(schedule: Schedule) -> list[Pair]:
    """Who exchanges messages with whom, the lower rank first."""
    found: set[Pair] = set()
    for step, _ in schedule.counted():
        ends = zip(step.source.tolist(), step.destination.tolist(), strict=True)
        found.update((min(pair), max(pair)) for pair in ends)
    return sorted(found)


# -- trees -----------------------------------------------------------------------------------------


def _as_tree(ranks: int, pairs: list[Pair], root: int) -> Tree:
    """Each rank's parent if the pairs form a tree; otherwise empty."""
    if ranks < 2 or len(pairs) != ranks - 1:
        return {}
    neighbours: list[list[int]] = [[] for _ in range(ranks)]
    for one, other in pairs:
        neighbours[one].append(other)
        neighbours[other].append(one)
    parents: Tree = {}
    todo, seen = [root], {root}
    while todo:
        rank = todo.pop()
        for other in neighbours[rank]:
            if other not in seen:
                seen.add(other)
                parents[other] = rank
                todo.append(other)
    return parents if len(seen) == ranks else {}


def _tidy(tree: Tree, depth: list[int]) -> list[Point]:
    """Leaves side by side, and each parent above the middle of its children."""
    children: list[list[int]] = [[] for _ in depth]
    for child, parent in sorted(tree.items()):
        children[parent].append(child)
    across = [0.0] * len(depth)
    leaves = 0
    order = sorted(range(len(depth)), key=lambda rank: depth[rank])
    visiting = [order[0]]
    while visiting:  # leaves from left to right
        rank = visiting.pop()
        if not children[rank]:
            across[rank], leaves = leaves, leaves + 1
        visiting.extend(reversed(children[rank]))
    for rank in reversed(order):
        if children[rank]:
            below = [across[child] for child in children[rank]]
            across[rank] = (min(below) + max(below)) / 2
    levels = max(depth) or 1
    return [((across[rank] + 0.5) / leaves, down / levels) for rank, down in enumerate(depth)]


def _two_trees(ranks: int, found: list[tuple[list[int], Tree]]) -> Arrangement:
    """One tree above the other, the lower one upside down: their leaves meet in the middle."""
    (_, first), (second_chunks, second) = found
    places = []
    for tree, top, sign in ((first, 0.0, 1), (second, 1.0, -1)):
        depth = [depth_in(tree, rank) for rank in range(ranks)]
        levels = max(depth) or 1
        points = [
            ((rank + 0.5) / ranks, top + sign * 0.41 * depth[rank] / levels)
            for rank in range(ranks)
        ]
        places.append(Place(points, sorted(tree.items())))
    return Arrangement("trees", 1.45, places, sorted(second_chunks))


# -- circles and grids -----------------------------------------------------------------------------


def _circle(ranks: int, pairs: list[Pair], node_size: int) -> Arrangement:
    """The first rank at the top, then clockwise."""
    turn, top = 2 * math.pi / ranks, -math.pi / 2
    angles = [top + turn * rank for rank in range(ranks)]
    points = [(0.5 + 0.5 * math.cos(at), 0.5 + 0.5 * math.sin(at)) for at in angles]
    if ranks == 1:
        points = [(0.5, 0.5)]
    arcs = []
    if 1 < node_size < ranks:
        for first in range(0, ranks, node_size):
            last = min(ranks, first + node_size) - 1
            arcs.append((top + (first - 0.4) * turn, top + (last + 0.4) * turn))
    return Arrangement("circle", 1.0, [Place(points, pairs)], arcs=arcs)


def _grid_columns(ranks: int, pairs: list[Pair]) -> int:
    """The number of columns of a grid in which all pairs are neighbours; 0 if there is none."""
    for columns in range(math.isqrt(ranks), ranks):
        rows = ranks // columns
        if ranks % columns or columns < 2 or rows < 2:
            continue
        if ranks > 4 and all(_are_neighbours(pair, columns, rows) for pair in pairs):
            return columns
    return 0


def _are_neighbours(pair: Pair, columns: int, rows: int) -> bool:
    (one_row, one_column), (row, column) = divmod(pair[0], columns), divmod(pair[1], columns)
    if one_row == row:
        return column - one_column in (1, columns - 1)
    return one_column == column and row - one_row in (1, rows - 1)


def _grid(ranks: int, columns: int, pairs: list[Pair]) -> Arrangement:
    rows = ranks // columns
    points = [
        ((rank % columns + 0.5) / columns, (rank // columns + 0.5) / rows) for rank in range(ranks)
    ]
    return Arrangement("grid", columns / rows, [Place(points, pairs)])
