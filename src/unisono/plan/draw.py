"""Schedules as pictures, in SVG.

Ranks are columns and steps are rows. An arrow is a chunk on its way, from the line above a step to
the line below it; each chunk has its own colour. A chunk on a solid arrow is added to what the
receiver has, one on a dashed arrow replaces it. If the chunks travel along one or two trees, these
are drawn above the steps.
"""

import colorsys
from collections.abc import Iterator

from unisono.plan.schedule import Schedule, Transfer
from unisono.show.pages import escape

Tree = dict[int, int]  # child: parent

_COLUMN, _ROW, _LEVEL, _MARGIN = 76, 64, 46, 56
_FONT = 'font-family="Helvetica, Arial, sans-serif"'


def trees(schedule: Schedule) -> list[tuple[list[int], Tree]]:
    """The one or two trees along which chunks travel, each with its chunks; otherwise none."""
    found: dict[tuple[tuple[int, int], ...], list[int]] = {}
    moves: dict[int, dict[str, list[tuple[int, int]]]] = {}
    for step in schedule.steps:
        for transfer in step:
            for chunk in range(transfer.chunk, transfer.chunk + transfer.count):
                edges_by_action = moves.setdefault(chunk, {"copy": [], "reduce": []})
                edges_by_action[transfer.action].append((transfer.source, transfer.destination))
    for chunk, edges_by_action in sorted(moves.items()):
        down = sorted((child, parent) for parent, child in edges_by_action["copy"])
        up = sorted(edges_by_action["reduce"])
        if down and up and down != up:
            return []
        edges = tuple(down or up)
        if len(edges) != schedule.ranks - 1 or len(dict(edges)) != len(edges):
            return []
        found.setdefault(edges, []).append(chunk)
    return [(chunks, dict(edges)) for edges, chunks in found.items()] if len(found) <= 2 else []


def to_svg(schedule: Schedule) -> str:
    """The schedule as the text of an SVG file. Raises ValueError for more than 32 ranks."""
    if schedule.ranks > 32:
        raise ValueError(f"a drawing has room for 32 ranks, not {schedule.ranks}")
    width = 2 * _MARGIN + _COLUMN * max(schedule.ranks - 1, 4)
    parts: list[str] = []
    y = 34.0
    parts.append(_text(_MARGIN - 20, y, schedule.title(), size=16, anchor="start"))
    for chunks, tree in trees(schedule):
        drawing, height = _tree_svg(schedule, chunks, tree, y + 40)
        parts += drawing
        y += height + 40
    parts += _steps_svg(schedule, y + 42, width)
    height = y + 42 + _ROW * schedule.rounds + 60
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}">\n<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _steps_svg(schedule: Schedule, top: float, width: float) -> Iterator[str]:
    bottom = top + _ROW * schedule.rounds
    for rank in range(schedule.ranks):
        x = _x(rank)
        yield _text(x, top - 14, f"rank {rank}", size=13)
        yield _line(x, top, x, bottom, "#cccccc")
    for number, step in enumerate(schedule.steps):
        y = top + _ROW * number
        yield _text(10, y + _ROW / 2 + 4, str(number), size=12, anchor="start", colour="#777777")
        yield _line(_MARGIN / 2, y, width - _MARGIN / 2, y, "#eeeeee")
        labelled = len(step) <= 2 * schedule.ranks  # with more, the colours must do
        for transfer in step:
            yield from _arrow(schedule, transfer, y, labelled)
    note = "solid: added, dashed: copied; each chunk has a colour"
    yield _text(_MARGIN - 20, bottom + 30, note, size=12, anchor="start", colour="#777777")


def _arrow(schedule: Schedule, transfer: Transfer, y: float, labelled: bool) -> Iterator[str]:
    colour = _colour(transfer.chunk, schedule.chunks)
    dash = transfer.action == "copy"
    start, end = _x(transfer.source), _x(transfer.destination)
    top, bottom = y + 5, y + _ROW - 5
    label = transfer.chunk_name if labelled else ""
    ends = {transfer.source, transfer.destination}
    if schedule.ranks > 3 and ends == {0, schedule.ranks - 1}:
        # Wraps around: leaves the picture on one side and comes back on the other.
        sides = _x(0) - 36, _x(schedule.ranks - 1) + 36
        out, back = sides if start < end else sides[::-1]
        middle = (top + bottom) / 2
        yield _line(start, top, out, middle, colour, dash)
        yield _line(back, middle, end, bottom, colour, dash, head=True)
        yield _text((start + out) / 2 + 4, top + 5, label, size=10, colour=colour)
        return
    yield _line(start, top, end, bottom, colour, dash, head=True)
    yield _text(
        start + (end - start) * 0.14 + (7 if end > start else -7),
        top + (bottom - top) * 0.14 - 3,
        label,
        size=10,
        anchor="start" if end > start else "end",
        colour=colour,
    )


def _tree_svg(
    schedule: Schedule, chunks: list[int], tree: Tree, top: float
) -> tuple[list[str], float]:
    """A tree, with each rank in its column and at its depth, and the height of the drawing."""
    depth = {rank: depth_in(tree, rank) for rank in range(schedule.ranks)}
    colour = _colour(chunks[0], schedule.chunks)
    names = f"c{chunks[0]}" if len(chunks) == 1 else f"c{chunks[0]} to c{chunks[-1]}"
    parts = [_text(_MARGIN - 20, top - 8, f"tree of {names}", 12, "start", colour)]

    def y(rank: int) -> float:
        return top + 14 + _LEVEL * depth[rank]

    for child, parent in tree.items():
        parts.append(_line(_x(child), y(child), _x(parent), y(parent), colour))
    for rank in range(schedule.ranks):
        parts.append(
            f'<circle cx="{_x(rank):g}" cy="{y(rank):g}" r="13" fill="white" '
            f'stroke="{colour}" stroke-width="1.6"/>'
        )
        parts.append(_text(_x(rank), y(rank) + 4, str(rank), size=12))
    return parts, 40 + _LEVEL * max(depth.values())


def depth_in(tree: Tree, rank: int) -> int:
    depth = 0
    while rank in tree and depth <= len(tree):
        rank, depth = tree[rank], depth + 1
    return depth


def _x(rank: int) -> float:
    return _MARGIN + 10 + _COLUMN * rank


def _colour(chunk: int, chunks: int) -> str:
    """Hues from around the colour wheel, darker where white paper would swallow them."""
    hue = chunk / chunks
    light = 0.36 if 0.1 < hue < 0.55 else 0.45
    red, green, blue = colorsys.hls_to_rgb(hue, light, 0.85)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def _line(
    x1: float, y1: float, x2: float, y2: float, colour: str, dash: bool = False, head: bool = False
) -> str:
    style = ' stroke-dasharray="5 3"' if dash else ""
    line = (
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{colour}" '
        f'stroke-width="1.6"{style}/>'
    )
    if not head:
        return line
    length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
    ux, uy = (x2 - x1) / length, (y2 - y1) / length
    left = f"{x2 - 8 * ux + 4 * uy:.1f},{y2 - 8 * uy - 4 * ux:.1f}"
    right = f"{x2 - 8 * ux - 4 * uy:.1f},{y2 - 8 * uy + 4 * ux:.1f}"
    return f'{line}\n<polygon points="{x2:g},{y2:g} {left} {right}" fill="{colour}"/>'


def _text(
    x: float, y: float, text: str, size: int = 12, anchor: str = "middle", colour: str = "#222222"
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" {_FONT} font-size="{size}" text-anchor="{anchor}" '
        f'fill="{colour}">{escape(text)}</text>'
    )
