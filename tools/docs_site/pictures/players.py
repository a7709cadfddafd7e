"""A page that plays for every algorithm, and the frames in which other pages show them."""

from __future__ import annotations

from html import escape
from itertools import groupby
from pathlib import Path

from unisono.plan import PRESETS, Algorithm, catalog
from unisono.plan.player import schedule_page

_RANKS = 8
_HEIGHT_PX = 880


def write_all(source: Path) -> dict[str, str]:
    """Write the pages. Returns a picture "player-COLLECTIVE-ALGORITHM" for each: a frame, closed;
    and "players": all of them, by collective."""
    folder = source / "_static/players"
    folder.mkdir(parents=True, exist_ok=True)
    lines, pictures = [], {}
    for collective, group in groupby(catalog(), key=lambda entry: entry.collective):
        lines.append(f"### {collective}\n")
        for entry in group:
            file = f"{collective}-{entry.name}.html"
            (folder / file).write_text(_page(entry), encoding="utf-8")
            title = f"{collective} by {entry.name}"
            pictures[f"player-{collective}-{entry.name}"] = frame = (
                f'<details class="player"><summary>{escape(title)} '
                f'<a href="_static/players/{escape(file)}">alone</a></summary>'
                f'<iframe title="{escape(title)}" src="_static/players/{escape(file)}" '
                f'loading="lazy" height="{_HEIGHT_PX}"></iframe></details>\n'
            )
            lines.append(frame)
    return {**pictures, "players": "\n".join(lines)}


def _page(entry: Algorithm) -> str:
    topology = PRESETS["h100"]
    if "node_size" in entry.options:  # it is about hosts
        topology = topology.with_nodes_of(_RANKS // 2)
    schedule = entry.schedule(_RANKS, node_size=_RANKS // 2, pieces=4)
    return schedule_page(schedule, topology)
