"""Where the ranks of a schedule stand in a picture: a circle, a tree, two trees, a grid, hosts.

By who talks to whom: one tree, or two, where chunks travel along trees; a grid where everybody
talks to neighbours of its row and column; boxes of ranks where a schedule knows hosts; a circle
for all others. Coordinates go from 0 to 1 to the right and downwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from unisono.plan.draw import Tree, trees
from unisono.plan.schedule import Schedule

Point = tuple[float, float]
Pair = tuple[int, int]

_WIDE, _TALL = 1.7, 0.7
"""Width by height that boxes of hosts should have, on a desk and on a phone."""


@dataclass(frozen=True)
class Place:
    """One picture of all ranks: a point for each, and the pairs that talk, drawn as lines."""

    points: tuple[Point, ...]
    pairs: tuple[Pair, ...]


@dataclass(frozen=True)
class Host:
    """What encloses the ranks of a host: a box (x, y, width, height), or an arc of the circle."""

    name: str
    box: tuple[float, float, float, float] | None = None
    arc: tuple[float, float] | None = None


@dataclass(frozen=True)
class Layout:
    """`kind` is "circle", "star", "tree", "trees", "grid" or "hosts"; `aspect` width by height.

    Two trees are two places, and `second_place_chunks` are those that travel along the second.
    """

    kind: str
    aspect: float
    places: tuple[Place, ...]
    second_place_chunks: frozenset[int] = frozenset()
    hosts: tuple[Host, ...] = field(default=())
    tall: Layout | None = None
    """The same for a narrow screen, where another shape suits it better."""


def arrange(schedule: Schedule, node_size: int) -> Layout:
    """The layout of a schedule whose ranks lie in hosts of `node_size`."""
    ranks = schedule.ranks
    pairs = talking_pairs(schedule)
    hosts = -(-ranks // node_size) if node_size < ranks else 1
    if tree := _as_tree(ranks, pairs, schedule.root):
        depth = _depths(tree, ranks)
        if max(depth) == 1 and ranks > 3:
            return _star(ranks, pairs, schedule.root)
        if max(depth) <= 2 * math.log2(max(ranks, 2)) + 1:
            return Layout("tree", 1.9, (Place(_tidy(tree, depth), tuple(pairs)),))
    elif (found := trees(schedule)) and len(found) == 2:
        return _two_trees(ranks, found, hosts, node_size)
    if columns := _grid_columns(ranks, pairs):
        return _grid(ranks, columns, pairs)
    if hosts > 1 and node_size > 1 and _crosses_alike(pairs, node_size):
        tall = _boxes(ranks, node_size, pairs, _TALL)
        return replace(_boxes(ranks, node_size, pairs, _WIDE), tall=tall)
    return _circle(ranks, pairs, hosts, node_size)


def talking_pairs(schedule: Schedule) -> list[Pair]:
    """Who exchanges messages with whom, the lower rank first."""
    found: set[Pair] = set()
    for phase in schedule.phases:
        for time in range(phase.times if phase.turn else 1):
            step = schedule.at(phase, time)
            ends = zip(step.source.tolist(), step.destination.tolist(), strict=True)
            found.update((min(pair), max(pair)) for pair in ends)
    return sorted(found)


# -- trees -----------------------------------------------------------------------------------------


def _as_tree(ranks: int, pairs: list[Pair], root: int) -> Tree:
    """Each rank's parent, where the pairs are a tree; otherwise empty."""
    if ranks < 2 or len(pairs) != ranks - 1:
        return {}
    beside: list[list[int]] = [[] for _ in range(ranks)]
    for one, other in pairs:
        beside[one].append(other)
        beside[other].append(one)
    parents: Tree = {}
    todo, seen = [root], {root}
    while todo:
        rank = todo.pop()
        for other in beside[rank]:
            if other not in seen:
                seen.add(other)
                parents[other] = rank
                todo.append(other)
    return parents if len(seen) == ranks else {}


def _depths(tree: Tree, ranks: int) -> list[int]:
    depths: dict[int, int] = {}

    def depth(rank: int) -> int:
        chain = []
        while rank in tree and rank not in depths:
            chain.append(rank)
            rank = tree[rank]
        base = depths.setdefault(rank, 0)
        for above, child in enumerate(reversed(chain), 1):
            depths[child] = base + above
        return base + len(chain)

    return [depth(rank) for rank in range(ranks)]


def _tidy(tree: Tree, depth: list[int]) -> tuple[Point, ...]:
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
    return tuple(
        ((across[rank] + 0.5) / leaves, depth[rank] / levels) for rank in range(len(depth))
    )


def _two_trees(
    ranks: int, found: list[tuple[list[int], Tree]], hosts: int, node_size: int
) -> Layout:
    """One above, one below, upside down: the leaves of both are in the middle."""
    (_, first), (second_chunks, second) = found
    places = []
    for tree, top, way in ((first, 0.0, 1), (second, 1.0, -1)):
        depth = _depths(tree, ranks)
        levels = max(depth) or 1
        points = tuple(
            ((rank + 0.5) / ranks, top + way * 0.41 * depth[rank] / levels) for rank in range(ranks)
        )
        places.append(Place(points, tuple(sorted(tree.items()))))
    boxes = tuple(
        Host(f"host {host}", (host * node_size / ranks, 0.0, node_size / ranks, 1.0))
        for host in range(hosts if hosts > 1 else 0)
    )
    return Layout("trees", 1.45, tuple(places), frozenset(second_chunks), boxes)


# -- circles and grids -----------------------------------------------------------------------------


def _on_circle(count: int, radius: float = 0.5) -> list[Point]:
    """Points on a circle, the first at the top, then clockwise."""
    angles = [2 * math.pi * number / count - math.pi / 2 for number in range(count)]
    return [(0.5 + radius * math.cos(angle), 0.5 + radius * math.sin(angle)) for angle in angles]


def _circle(ranks: int, pairs: Iterable[Pair], hosts: int, node_size: int) -> Layout:
    arcs = []
    for host in range(hosts if hosts > 1 and node_size > 1 else 0):
        first, last = host * node_size, min(ranks, (host + 1) * node_size) - 1
        turn = 2 * math.pi / ranks
        top = -math.pi / 2
        arcs.append(
            Host(f"host {host}", arc=(top + (first - 0.4) * turn, top + (last + 0.4) * turn))
        )
    points = tuple(_on_circle(ranks)) if ranks > 1 else ((0.5, 0.5),)
    return Layout("circle", 1.0, (Place(points, tuple(pairs)),), hosts=tuple(arcs))


def _star(ranks: int, pairs: Iterable[Pair], root: int) -> Layout:
    around = _on_circle(ranks - 1)
    points = [*around[:root], (0.5, 0.5), *around[root:]]
    return Layout("star", 1.0, (Place(tuple(points), tuple(pairs)),))


def _grid_columns(ranks: int, pairs: list[Pair]) -> int:
    """How many columns a grid has in which all pairs are neighbours; 0 where there is none."""
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


def _grid(ranks: int, columns: int, pairs: list[Pair]) -> Layout:
    rows = ranks // columns
    points = tuple(
        ((rank % columns + 0.5) / columns, (rank // columns + 0.5) / rows) for rank in range(ranks)
    )
    return Layout("grid", columns / rows, (Place(points, tuple(pairs)),))


def _crosses_alike(pairs: list[Pair], node_size: int) -> bool:
    """Whether between hosts only ranks talk that have the same place in theirs."""
    return all(
        one // node_size == other // node_size or one % node_size == other % node_size
        for one, other in pairs
    )


def _boxes(ranks: int, node_size: int, pairs: list[Pair], aspect: float) -> Layout:
    """A box for each host, its ranks in a square of rows; all boxes about in the shape `aspect`."""
    hosts = -(-ranks // node_size)
    columns = math.ceil(math.sqrt(node_size))
    rows = math.ceil(node_size / columns)

    def fits_badly(across: int) -> float:
        down = -(-hosts // across)
        shape = across * columns / down / rows
        return (across * down - hosts) / hosts + abs(math.log(shape / aspect))

    across = min(range(1, hosts + 1), key=fits_badly)
    down = -(-hosts // across)
    width, height = 1 / across, 1 / down
    points, boxes = [], []
    for host in range(hosts):
        left, top = host % across * width, host // across * height
        inside = (left + 0.05 * width, top + 0.06 * height, 0.9 * width, 0.88 * height)
        boxes.append(Host(f"host {host}", inside))
        for place in range(min(node_size, ranks - host * node_size)):
            column, row = place % columns, place // columns
            points.append(
                (
                    inside[0] + inside[2] * (column + 0.5) / columns,
                    inside[1] + inside[3] * (0.14 + 0.86 * (row + 0.5) / rows),
                )
            )
    reached = across * columns / (down * (rows + 0.35))
    return Layout("hosts", reached, (Place(tuple(points), tuple(pairs)),), hosts=tuple(boxes))
